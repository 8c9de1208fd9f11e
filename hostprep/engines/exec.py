"""`hostprep exec`: claim regions, complete the command's environment, become the command."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

from hostprep.client.claim import claim
from hostprep.client.environment import LeaseEnvironment
from hostprep.client.lease import Lease, Request
from hostprep.engines.installation import find_program
from hostprep.engines.links import check_paths, check_template, link_at, link_regions
from hostprep.errors import BadInputError, NotReadyError
from hostprep.linux.files import from_os_error
from hostprep.paths import PoolPaths
from hostprep.zipapp import pass_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import NoReturn


def run_exec(options: argparse.Namespace) -> NoReturn:
    """Claim the regions and replace this process by the command, which then holds the lease.

    An engine's command is read before the claim, so that one that contradicts itself, `hostprep
    exec` or the integration claims nothing. The leased descriptors are passed on open: the lease
    lives exactly as long as the command or any child that inherits them. So are the locks that
    keep the zipapp that the command imports from, and nothing else.
    Raises HostprepError; the claim is given back then.
    """
    command = tuple(options.command)
    if not command:
        raise BadInputError(
            "there is no command to become", reason="NoCommand", remedy="give it after --"
        )
    paths = PoolPaths(options.root, options.pool)
    count = 1 if options.count is None else options.count
    request = Request(count, options.size_bytes, options.numa_node, tuple(options.region))
    launcher, because = None, ""
    if options.engine is not None:
        from hostprep.engines import launching
        from hostprep.engines.catalogue import integration_of

        asked = launching.Options(options.count, request.size_bytes, request.names)
        integration = integration_of(options.engine)
        engine = launching.EngineStart(integration, command, os.environ, asked)
        launcher = launching.launcher_of(integration)
        required = launching.reconcile_options(asked, launcher.requirements(engine))
        check_paths(paths.root, required.link_paths)
        request = replace(request, count=required.count, size_bytes=required.size_bytes)
        because = required.because
    _find_program(command[0])
    if options.link is not None:
        check_template(paths, options.link, request.wanted)
    leases = _claim(paths, request, options.wait, because)
    variables = {**os.environ, **LeaseEnvironment.of(leases).to_variables()}
    links: tuple[tuple[str, int], ...] = ()
    if launcher is not None:
        launch = launcher.complete(engine, leases)
        for note in launch.notes:
            print(f"hostprep: {note}", file=sys.stderr, flush=True)
        command, links = launch.command, launch.links
        variables.update(launch.variables)
    if options.link is not None:
        link_regions(leases, options.link)
    link_at(leases, links)
    _become(command, variables, leases)


def _become(command: tuple[str, ...], variables: dict[str, str], leases: list[Lease]) -> NoReturn:
    for lease in leases:
        os.set_inheritable(lease.fd, True)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)  # Python ignores them, and exec passes that on
    variables.update(pass_on(variables))
    program = _find_program(command[0])
    try:
        os.execve(program, command, variables)  # noqa: S606 - that is the point
    except OSError as error:
        raise from_os_error(error, f"run {program}") from error


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
    program = find_program(command, os.environ)
    if program is None:
        raise BadInputError(
            f"there is no program {command!r}",
            reason="NoCommand",
            remedy="check its name and PATH",
        )
    return program
