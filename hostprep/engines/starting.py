"""`hostprep exec --engine NAME`: what the engine's launcher says, before the claim and after."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from hostprep.engines.catalogue import way_of
from hostprep.engines.launching import Launch, Options, Wanted, agreed, launcher_of
from hostprep.engines.links import check_places
from hostprep.paths import PoolPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.lease import Lease
    from hostprep.client.request import Request
    from hostprep.engines.launching import Launcher

__all__ = ["EngineStart", "read_engine"]


class EngineStart:
    """An engine whose command was read and found to need nothing that cannot be."""

    def __init__(self, launcher: Launcher, wanted: Wanted) -> None:
        self._launcher = launcher
        self.wanted = wanted

    @property
    def because(self) -> str:
        """Who asks for a size, for the error where no region has it; empty: nobody."""
        return self.wanted.because

    def request_for(self, request: Request) -> Request:
        """Return the claim with what the command needs of it."""
        return replace(request, count=self.wanted.count, size_bytes=self.wanted.size_bytes)

    def arranged(self, command: tuple[str, ...], leases: Sequence[Lease]) -> Launch:
        """Return the command completed for these leases, its notes told on standard error."""
        launch = self._launcher.arranged(command, os.environ, leases)
        for note in launch.notes:
            print(f"hostprep: {note}", file=sys.stderr, flush=True)
        return launch


def read_engine(
    name: str, paths: PoolPaths, command: tuple[str, ...], options: Options
) -> EngineStart:
    """Read an engine's command before anything is claimed.

    Raises BadInputError for an engine that we do not know, and for a command that contradicts
    itself, `hostprep exec` or the way.
    """
    launcher = launcher_of(way_of(name).launcher)
    wanted = agreed(options, launcher.wanted(command, os.environ, options))
    check_places(paths.root, wanted.places)
    return EngineStart(launcher, wanted)
