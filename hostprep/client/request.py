"""What is claimed: any regions that fit, or named ones; all of them or none."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.client.handoff import Handoff, Region
from hostprep.client.owner import Owner
from hostprep.errors import BadInputError, NotReadyError
from hostprep.units import format_bytes

__all__ = ["Request"]


@dataclass(frozen=True)
class Request:
    """A batch of `count` regions of at least `size_bytes` each, or the regions `names`."""

    count: int = 1
    size_bytes: int = 1
    numa_node: int | None = None
    names: tuple[str, ...] = ()
    owner: Owner | None = None

    def __post_init__(self) -> None:
        if self.count < 1 or self.size_bytes < 1:
            raise BadInputError("a claim needs at least one region of at least one byte")
        if len(set(self.names)) < len(self.names):
            raise BadInputError("a claim names a region twice")

    @property
    def wanted(self) -> int:
        """Number of regions that the claim takes."""
        return len(self.names) or self.count

    def candidates(self, handoff: Handoff) -> tuple[Region, ...]:
        """Return the regions that could serve, the best fitting first.

        Raises NotReadyError where the pool could never serve it as it stands.
        """
        for name in self.names:
            if handoff.region(name) is None:
                raise self._cannot(handoff, f"has no region {name}")
        fitting = sorted(
            (region for region in handoff.regions if self._fits(region)),
            key=lambda region: (region.size_bytes, region.name),
        )
        if len(fitting) < self.wanted:
            raise self._cannot(
                handoff,
                f"has {len(fitting)} region(s) that fit, {self.wanted} are needed"
                f" (at least {format_bytes(self.size_bytes)}"
                + ("" if self.numa_node is None else f" on NUMA node {self.numa_node}")
                + ")",
            )
        return tuple(fitting)

    def _fits(self, region: Region) -> bool:
        if self.names and region.name not in self.names:
            return False
        if self.numa_node is not None and region.numa_node not in (None, self.numa_node):
            return False
        return region.size_bytes >= self.size_bytes

    def _cannot(self, handoff: Handoff, what: str) -> NotReadyError:
        listed = ", ".join(
            f"{region.name} {format_bytes(region.size_bytes)}" for region in handoff.regions[:8]
        )
        return NotReadyError(
            f"pool {handoff.pool} {what}",
            reason="NoSuchRegion",
            remedy=f"the pool holds: {listed or 'nothing'}; ask for that, or enlarge the pool",
        )
