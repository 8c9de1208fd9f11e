"""The variables by which `hostprep exec` passes its leases to a command."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hostprep.errors import NotReadyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.lease import Lease


WARM = "HOSTPREP_WARM"
"""The name under which the engine's contents are kept; unset: nothing is kept."""


@dataclass(frozen=True)
class LeaseEnvironment:
    """A lease as HOSTPREP_* variables. Lists are separated by colons, regions in one order."""

    root: str
    pool: str
    lease_id: str
    regions: tuple[str, ...]
    paths: tuple[str, ...]
    fds: tuple[int, ...]
    size_bytes: int
    """Of the smallest of the regions."""
    page_bytes: int

    @classmethod
    def of(cls, leases: Sequence[Lease]) -> LeaseEnvironment:
        """Return the variables' values for a batch of at least one lease."""
        first = leases[0]
        return cls(
            root=first.paths.root,
            pool=first.paths.pool,
            lease_id=first.lease_id,
            regions=tuple(lease.region.name for lease in leases),
            paths=tuple(lease.path for lease in leases),
            fds=tuple(lease.fd for lease in leases),
            size_bytes=min(lease.region.size_bytes for lease in leases),
            page_bytes=first.region.page_bytes,
        )

    def to_variables(self) -> dict[str, str]:
        """Return the variables to set."""
        return {
            "HOSTPREP_ROOT": self.root,
            "HOSTPREP_POOL": self.pool,
            "HOSTPREP_LEASE": self.lease_id,
            "HOSTPREP_REGIONS": ":".join(self.regions),
            "HOSTPREP_PATH": self.paths[0],
            "HOSTPREP_PATHS": ":".join(self.paths),
            "HOSTPREP_FDS": ":".join(str(fd) for fd in self.fds),
            "HOSTPREP_SIZE_BYTES": str(self.size_bytes),
            "HOSTPREP_PAGE_BYTES": str(self.page_bytes),
        }

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> LeaseEnvironment:
        """Read the variables. Raises NotReadyError outside of `hostprep exec`."""
        try:
            return cls(
                root=variables["HOSTPREP_ROOT"],
                pool=variables["HOSTPREP_POOL"],
                lease_id=variables["HOSTPREP_LEASE"],
                regions=tuple(variables["HOSTPREP_REGIONS"].split(":")),
                paths=tuple(variables["HOSTPREP_PATHS"].split(":")),
                fds=tuple(int(fd) for fd in variables["HOSTPREP_FDS"].split(":")),
                size_bytes=int(variables["HOSTPREP_SIZE_BYTES"]),
                page_bytes=int(variables["HOSTPREP_PAGE_BYTES"]),
            )
        except (KeyError, ValueError) as error:
            raise NotReadyError(
                f"this process was not started by `hostprep exec` ({error})",
                reason="NoLease",
                remedy="start it with `hostprep exec POOL -- CMD`, or give pool and lease",
            ) from error
