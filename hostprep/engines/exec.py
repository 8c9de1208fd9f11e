"""`hostprep exec`: claim regions, complete the command's environment, become the command."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

from hostprep.client.claim import claim
from hostprep.client.environment import WARM, LeaseEnvironment
from hostprep.client.handoff import read_handoff
from hostprep.client.lease import Lease, Request
from hostprep.client.owner import Owner, check_owner_name, read_token_file
from hostprep.engines.installation import find_program
from hostprep.engines.links import check_paths, check_template, link_at, link_regions
from hostprep.errors import BadInputError, HostprepError, NotReadyError
from hostprep.linux.files import from_os_error
from hostprep.paths import PoolPaths
from hostprep.zipapp import pass_on

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import NoReturn

_PAUSE_S = 0.05


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
    _check_warm(options)
    launcher, because = None, ""
    if options.engine is not None:
        from hostprep.engines import launching
        from hostprep.engines.catalogue import integration_of

        asked = launching.Options(
            options.count, request.size_bytes, request.names, warm=options.warm is not None
        )
        integration = integration_of(options.engine)
        if options.warm is not None and not integration.keeps:
            raise _cannot_keep(options.engine)
        engine = launching.EngineStart(integration, command, os.environ, asked)
        launcher = launching.launcher_of(integration)
        required = launching.reconcile_options(asked, launcher.requirements(engine))
        check_paths(paths.root, required.link_paths)
        request = replace(request, count=required.count, size_bytes=required.size_bytes)
        because = required.because
    _find_program(command[0])
    if options.link is not None:
        check_template(paths, options.link, request.wanted)
    wait_timeout_s = options.wait
    if options.warm is not None:
        wait_timeout_s = _wait_for_pool(options, paths, request, because)
        request = replace(request, owner=_owner(options))
    leases = _claim(paths, request, wait_timeout_s, because)
    variables = {**os.environ, **LeaseEnvironment.of(leases).to_variables()}
    variables.pop(WARM, None)  # of a surrounding `exec`: these regions are not kept by that
    if options.warm is not None:
        variables[WARM] = options.warm
        _say_what_was_kept(options.warm, leases)
    links: tuple[tuple[str, int], ...] = ()
    used_bytes = None
    if launcher is not None:
        launch = launcher.complete(engine, leases)
        used_bytes = launch.used_bytes
        for note in launch.notes:
            print(f"hostprep: {note}", file=sys.stderr, flush=True)
        command, links = launch.command, launch.links
        variables.update(launch.variables)
    _warn_of_idle(leases, options.engine, used_bytes)
    if options.link is not None:
        link_regions(leases, options.link)
    link_at(leases, links)
    _become(command, variables, leases)


def _check_warm(options: argparse.Namespace) -> None:
    """Raise BadInputError where only one of --warm and --owner-file is given, or a bad name."""
    if options.warm is None and options.owner_file is None:
        return
    if options.warm is None:
        raise BadInputError(
            "--owner-file without --warm: under which name is the memory kept?",
            reason="BadOwner",
            remedy="add --warm NAME, such as --warm chat-70b, or leave --owner-file out",
        )
    check_owner_name(options.warm, "--warm")
    if options.owner_file is None:
        raise BadInputError(
            "--warm without --owner-file: what shows that the next engine is the same one?",
            reason="BadOwner",
            remedy="add --owner-file FILE, on a volume of the engine's own; a file that is missing "
            "is made",
        )


def _cannot_keep(engine: str) -> BadInputError:
    from hostprep.engines.catalogue import INTEGRATIONS

    keeps = ", ".join(each.name for each in INTEGRATIONS if each.keeps)
    return BadInputError(
        f"--warm: engine {engine} does not find its memory's contents again",
        reason="CannotKeep",
        remedy=f"leave --warm out; what can keep: {keeps}",
    )


def _owner(options: argparse.Namespace) -> Owner:
    token, made = read_token_file(options.owner_file)
    if made:
        print(
            f"hostprep: made {options.owner_file} with a random token: whoever has it gets what is"
            " kept",
            file=sys.stderr,
            flush=True,
        )
    # Another kind of engine would not void the directory of what it overwrites.
    return Owner(token, {"engine": options.engine or "none"}, options.warm)


def _say_what_ends(regions: frozenset[str]) -> None:
    print(
        f"hostprep: waiting for {', '.join(sorted(regions))}: processes of the last engine, which "
        "ends, still use what was kept",
        file=sys.stderr,
        flush=True,
    )


def _say_what_was_kept(name: str, leases: list[Lease]) -> None:
    kept = [lease.region.name for lease in leases if lease.contents_kept]
    why = next((lease.discarded for lease in leases if lease.discarded), None)
    if kept:
        text = f"{name}: {', '.join(kept)} as it was left"
    else:
        text = f"{name}: starts empty" + (f": {why}" if why else "")
    print(f"hostprep: {text}", file=sys.stderr, flush=True)


def _warn_of_idle(leases: list[Lease], engine: str | None, used_bytes: int | None) -> None:
    """Say how much of a sized pool this engine leaves unused, where that is more than a tenth."""
    from hostprep.engines.idle import idle_beside

    if engine is None:
        return  # a command that may be no engine at all
    first = leases[0]
    claimed = [lease.region.name for lease in leases]
    idle = idle_beside(first.paths, first.handoff, claimed, used_bytes=used_bytes)
    if idle is None:
        return
    print(
        f"hostprep: warning: {idle.describe()}; {idle.remedy(engine)}", file=sys.stderr, flush=True
    )


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
        return claim(paths, request, wait_timeout_s=wait_timeout_s, on_ending=_say_what_ends)
    except NotReadyError as error:
        raise _with_reason(error, because) from error


def _with_reason(error: NotReadyError, because: str) -> HostprepError:
    if not because or error.reason != "NoSuchRegion":
        return error
    return BadInputError(f"{because}: {error.message}", reason="DoesNotFit", remedy=error.remedy)


def _wait_for_pool(
    options: argparse.Namespace, paths: PoolPaths, request: Request, because: str
) -> float:
    """Wait until the pool could serve the claim, so that no owner's file is made for nothing.

    Returns the seconds that are left to wait. Raises as the claim would.
    """
    if not options.owner_file or os.path.lexists(options.owner_file):
        return float(options.wait)
    deadline_s = time.monotonic() + float(options.wait)
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            request.candidates(read_handoff(paths))
        except NotReadyError as error:
            if left_s <= 0:
                raise _with_reason(error, because) from error
        else:
            return max(0.0, left_s)
        time.sleep(min(_PAUSE_S, left_s))


def _find_program(command: str) -> str:
    program = find_program(command, os.environ)
    if program is None:
        raise BadInputError(
            f"there is no program {command!r}",
            reason="NoCommand",
            remedy="check its name and PATH",
        )
    return program
