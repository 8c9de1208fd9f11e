"""What `hostprep exec --engine NAME` asks of an engine's launcher, before and after the claim.

A launcher is a module with `wanted` and `arranged`. Neither changes anything: `hostprep exec`
claims, links and becomes the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from hostprep.client.lease import Lease

    class Launcher(Protocol):
        """The two functions of an engine's launcher module."""

        def wanted(
            self, command: tuple[str, ...], environ: Mapping[str, str], options: Options
        ) -> Wanted:
            """Read the command: what it needs. Raises BadInputError; nothing is claimed yet."""

        def arranged(
            self, command: tuple[str, ...], environ: Mapping[str, str], leases: Sequence[Lease]
        ) -> Launch:
            """Return the command as it is to run over these leases."""


__all__ = ["Launch", "Options", "Wanted", "agreed", "launcher_of"]


@dataclass(frozen=True)
class Options:
    """What `hostprep exec` itself was told, where it bears on the engine."""

    count: int | None = None
    size_bytes: int = 1
    regions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """What an engine's command needs of the pool."""

    count: int = 1
    """Regions, all or none."""
    size_bytes: int = 1
    """The least that each must have."""
    because: str = ""
    """Who says so, for the error: an option of the command."""
    places: tuple[str, ...] = ()
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


def launcher_of(module: str) -> Launcher:
    """Return an engine's launcher. Raises BadInputError where this build has none."""
    from importlib import import_module

    try:
        launcher: Launcher = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise BadInputError(
            f"this hostprep has no {module}",
            reason="NoSuchEngine",
            remedy="update it, or leave --engine out and use --link or the variables",
        ) from error
    return launcher


def agreed(options: Options, wanted: Wanted) -> Wanted:
    """Return what to claim, where the command and `hostprep exec` may both have said something.

    Raises BadInputError where the two contradict: the numbers are named.
    """
    given = len(options.regions) or options.count
    if given is not None and given != wanted.count:
        option = "--region" if options.regions else "--count"
        raise BadInputError(
            f"the engine needs {wanted.count} region(s), {option} gives it {given}",
            reason="WrongCount",
            remedy=f"leave {option} out"
            if not options.regions
            else f"name {wanted.count} region(s)",
        )
    size_bytes = max(options.size_bytes, wanted.size_bytes)
    because = wanted.because if size_bytes == wanted.size_bytes else ""
    return Wanted(wanted.count, size_bytes, because, wanted.places)
