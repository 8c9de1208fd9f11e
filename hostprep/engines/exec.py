"""`hostprep exec`: claim regions, complete the command's environment, become the command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

from hostprep.client.claim import claim
from hostprep.client.environment import LeaseEnvironment
from hostprep.client.lease import Lease, Request
from hostprep.errors import BadInputError, NotReadyError
from hostprep.linux.files import from_os_error
from hostprep.paths import PoolPaths
from hostprep.zipapp import pass_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.engines.launching import Launch, Options


def execute(
    paths: PoolPaths,
    request: Request,
    command: tuple[str, ...],
    *,
    wait_timeout_s: float,
    link: str | None,
    engine: EngineStart | None = None,
) -> None:
    """Claim the regions and replace this process by the command, which then holds the lease.

    The leased descriptors are passed on open: the lease lives exactly as long as the command or
    any child that inherits them. So are the locks that keep the zipapp that the command imports
    from, and nothing else. Does not return.
    Raises HostprepError; the claim is given back then.
    """
    _find_program(command[0])
    if link is not None:
        from hostprep.engines.links import check_template

        check_template(paths, link, request.wanted)
    leases = _claim(paths, request, wait_timeout_s, engine.because if engine else "")
    launch = engine.complete(command, leases) if engine else None
    if link is not None or (launch is not None and launch.links):
        from hostprep.engines.links import link_at, link_regions

        if link is not None:
            link_regions(leases, link)
        if launch is not None:
            link_at(leases, launch.links)
    for lease in leases:
        os.set_inheritable(lease.fd, True)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)  # Python ignores them, and exec passes that on
    variables = {**os.environ, **LeaseEnvironment.of(leases).to_variables()}
    if launch is not None:
        command = launch.command
        variables.update(launch.variables)
    variables.update(pass_on(variables))
    program = _find_program(command[0])
    try:
        os.execve(program, command, variables)  # noqa: S606 - that is the point
    except OSError as error:
        raise from_os_error(error, f"run {program}") from error


class EngineStart:
    """An engine whose command was read before the claim, and contradicts nothing."""

    def __init__(
        self, name: str, paths: PoolPaths, command: tuple[str, ...], options: Options
    ) -> None:
        """Read the command.

        Raises BadInputError for an unknown engine, and for a command that contradicts itself,
        `hostprep exec` or the integration.
        """
        from hostprep.engines.catalogue import integration_of
        from hostprep.engines.launching import launcher_of, reconcile_options
        from hostprep.engines.links import check_paths

        self._integration = integration_of(name)
        self._launcher = launcher_of(self._integration)
        required = self._launcher.requirements(self._integration, command, os.environ, options)
        self._required = reconcile_options(options, required)
        check_paths(paths.root, self._required.link_paths)

    @property
    def because(self) -> str:
        """Which option asks for the size, for the error where no region has it; may be empty."""
        return self._required.because

    def request_for(self, request: Request) -> Request:
        """Return the claim with what the command needs of it."""
        return replace(request, count=self._required.count, size_bytes=self._required.size_bytes)

    def complete(self, command: tuple[str, ...], leases: Sequence[Lease]) -> Launch:
        """Return the command completed for these leases, and print its notes."""
        launch = self._launcher.complete(self._integration, command, os.environ, leases)
        for note in launch.notes:
            print(f"hostprep: {note}", file=sys.stderr, flush=True)
        return launch


def _claim(paths: PoolPaths, request: Request, wait_timeout_s: float, because: str) -> list[Lease]:
    try:
        return claim(paths, request, wait_timeout_s=wait_timeout_s)
    except NotReadyError as error:
        if not because or error.reason != "NoSuchRegion":
            raise
        raise BadInputError(
            f"{because}: {error.message}", reason="DoesNotFit", remedy=error.remedy
        ) from error


def _find_program(command: str) -> str:
    """Return the program's path, as a shell would find it (shutil.which costs 10 ms).

    Raises BadInputError where there is none.
    """
    folders = [""] if "/" in command else os.get_exec_path()
    for folder in folders:
        path = f"{folder}/{command}" if folder else command
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise BadInputError(
        f"there is no program {command!r}",
        reason="NoCommand",
        remedy="check its name and PATH",
    )
