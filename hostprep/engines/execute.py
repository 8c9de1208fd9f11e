"""`hostprep exec`: claim, tell the command, become the command."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from hostprep.client.claim import claim
from hostprep.client.environment import LeaseEnvironment
from hostprep.client.lease import Lease
from hostprep.client.request import Request
from hostprep.errors import BadInputError, NotReadyError
from hostprep.linux.files import from_os_error
from hostprep.paths import PoolPaths
from hostprep.zipapp import pass_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.engines.starting import EngineStart

__all__ = ["ExecOrder", "execute"]


@dataclass(frozen=True)
class ExecOrder:
    """What to claim, where to link it, and what to become."""

    paths: PoolPaths
    request: Request
    wait_timeout_s: float
    link: str | None
    command: tuple[str, ...]
    engine: EngineStart | None = None
    """Who completes the command, where it is an engine that we know."""


def execute(order: ExecOrder) -> None:
    """Claim the regions and replace this process by the command, which then holds the lease.

    The leased descriptors are passed on open: the lease lives exactly as long as the command or
    any child that inherits them. So are the locks that keep the zipapp that the command imports
    from, and nothing else. Does not return.
    Raises HostprepError; the claim is given back then.
    """
    _find(order.command[0])
    if order.link is not None:
        from hostprep.engines.links import check_template

        check_template(order.paths, order.link, order.request.wanted)
    leases = _claimed(order)
    launch = order.engine.arranged(order.command, leases) if order.engine else None
    if order.link is not None or (launch is not None and launch.links):
        from hostprep.engines.links import link_at, link_regions

        if order.link is not None:
            link_regions(leases, order.link)
        if launch is not None:
            link_at(leases, launch.links)
    for lease in leases:
        os.set_inheritable(lease.fd, True)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)  # Python ignores them, and exec passes that on
    variables = {**os.environ, **LeaseEnvironment.of(leases).to_variables()}
    command = order.command
    if launch is not None:
        command = launch.command
        variables.update(launch.variables)
    variables.update(pass_on(variables))
    program = _find(command[0])
    try:
        os.execve(program, command, variables)  # noqa: S606 - that is the point
    except OSError as error:
        raise from_os_error(error, f"run {program}") from error


def _claimed(order: ExecOrder) -> list[Lease]:
    try:
        return claim(order.paths, order.request, wait_timeout_s=order.wait_timeout_s)
    except NotReadyError as error:
        if order.engine is None or not order.engine.because or error.reason != "NoSuchRegion":
            raise
        raise BadInputError(
            f"{order.engine.because}: {error.message}", reason="DoesNotFit", remedy=error.remedy
        ) from error


def _find(command: str) -> str:
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
