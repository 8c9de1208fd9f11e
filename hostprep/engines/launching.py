"""What `hostprep exec --engine NAME` asks of an engine's launcher, before and after the claim.

The catalogue names one launcher module for each integration. It has two functions, `requirements`
and `complete`, which change nothing: `hostprep exec` claims, links and becomes the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hostprep.engines.catalogue import Integration
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from hostprep.client.lease import Lease

    class Launcher(Protocol):
        """The two functions of a launcher module."""

        def requirements(self, start: EngineStart) -> Requirements:
            """Read the command. Raises BadInputError; nothing is claimed yet."""

        def complete(self, start: EngineStart, leases: Sequence[Lease]) -> Launch:
            """Return the command as it is to run over these leases."""


@dataclass(frozen=True)
class Options:
    """The options of `hostprep exec` that concern the engine."""

    count: int | None = None
    size_bytes: int = 1
    regions: tuple[str, ...] = ()

    @property
    def region_count(self) -> int:
        """How many regions are asked for, 1 by default."""
        return len(self.regions) or self.count or 1


@dataclass(frozen=True)
class EngineStart:
    """The command that is to start an engine, as it was given to `hostprep exec`."""

    integration: Integration
    command: tuple[str, ...]
    environ: Mapping[str, str]
    options: Options = Options()


@dataclass(frozen=True)
class Requirements:
    """What an engine's command needs of the pool."""

    count: int = 1
    """Regions, all or none."""
    size_bytes: int = 1
    """The least that each must have."""
    because: str = ""
    """Which option of the command asks for that size, for the error; empty: none does."""
    link_paths: tuple[str, ...] = ()
    """Paths that are known before the claim and must be free: links will be made there."""


@dataclass(frozen=True)
class Launch:
    """How the engine is started over its leases."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    """To be added to the environment."""
    links: tuple[tuple[str, int], ...] = ()
    """Paths, and which lease each leads to."""
    notes: tuple[str, ...] = ()
    """For people, on standard error."""


def launcher_of(integration: Integration) -> Launcher:
    """Import an integration's launcher, and with it no other engine's."""
    from importlib import import_module

    launcher: Launcher = import_module(integration.launcher)
    return launcher


def reconcile_options(options: Options, required: Requirements) -> Requirements:
    """Return what to claim, where the command and `hostprep exec` may both ask for something.

    Raises BadInputError with both numbers where the two contradict each other.
    """
    given = len(options.regions) or options.count
    if given is not None and given != required.count:
        option = "--region" if options.regions else "--count"
        raise BadInputError(
            f"the engine needs {required.count} region(s), {option} gives it {given}",
            reason="WrongCount",
            remedy=f"name {required.count} region(s)" if options.regions else f"leave {option} out",
        )
    if options.size_bytes > required.size_bytes:
        required = replace(required, size_bytes=options.size_bytes, because="")
    return required
