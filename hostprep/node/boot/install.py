"""`boot: systemd`: the node's own copy of the boot scripts, and the one unit that runs them.

Only what begins with our mark is ever changed or removed. systemd is told nothing: it reads the
unit at the next boot, which is when there is something to do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from hostprep.api.pool_spec import PoolSpec
from hostprep.errors import HostprepError, NotReadyError
from hostprep.linux.files import closing_fd, from_os_error
from hostprep.linux.processes import sees_all_processes
from hostprep.node.boot.host_files import HostFiles, not_ours, where_we_write
from hostprep.node.boot.record import FILE_NAME, read_record, write_record
from hostprep.node.boot.script import boot_script, systemd_unit

__all__ = ["UNIT", "BootUnit", "host_folder", "keep_boot_unit"]

UNIT = "hostprep-boot.service"
_SCRIPTS = "etc/hostprep"
_UNITS = "etc/systemd/system"
_WANTS = f"{_UNITS}/multi-user.target.wants"
_TARGET = f"/{_UNITS}/{UNIT}"
_OF_FILES = ("NoPermission", "ReadOnly", "NoSpace", "BadRoot", "Failed")
_BY_HAND = "or put the script on the node yourself: hostprep boot --script"


@dataclass(frozen=True, slots=True)
class BootUnit:
    """What the node will do at its next boot, and what stood in the way of more."""

    pools: tuple[str, ...] = ()
    """Whose scripts the unit runs, in that order."""
    failures: tuple[tuple[str, str], ...] = ()
    """(pool, why and what to do)."""


def host_folder() -> str:
    """Return where the node's own files lie: below PID 1's root where we have another.

    Raises NotReadyError where they cannot be reached: in a container that takes the host's
    process ids, and the right to look at others' processes (proc(5), /proc/PID/root).
    """
    try:
        own, first = os.stat("/proc/self/ns/mnt"), os.stat("/proc/1/ns/mnt")
        if own.st_ino == first.st_ino:
            return "/"
        os.stat("/proc/1/root/etc")
    except OSError as error:
        raise NotReadyError(
            f"the node's files cannot be reached ({error.strerror})",
            reason="NoHostFiles",
            remedy=f"give the agent agent.hostPID=true and agent.mode=privileged, {_BY_HAND}",
        ) from error
    return "/proc/1/root"


def keep_boot_unit(
    wanted: Sequence[PoolSpec],
    unwanted: Collection[str],
    *,
    root: str,
    host: str | None = None,
    state: str | None = None,
) -> BootUnit:
    """Have the scripts of `wanted` and the unit on the node, those of `unwanted` removed.

    Scripts of pools in neither stay. Nothing is written that is right already. Never raises: what
    could not be done is in the result, pool by pool. `host` is the node's root folder, found by
    `host_folder` if it is None. `state` is the agent's state folder: where the node cannot be
    reached, what it remembers tells which of `unwanted` have a script there still.
    """
    if not wanted and not unwanted:
        return BootUnit()
    try:
        with contextlib.ExitStack() as stack:
            keeper = _Keeper(HostFiles(_open_host(stack, host or host_folder())), root, state)
            return keeper.keep(sorted(wanted, key=lambda spec: -spec.priority), unwanted)
    except (HostprepError, OSError) as error:
        failures = [(spec.name, _said(_ours(error))) for spec in wanted]
        left = sorted(read_record(state).intersection(unwanted))
        failures += [(name, _left_behind(name, _ours(error), str(state))) for name in left]
        return BootUnit(failures=tuple(failures))


def _open_host(stack: contextlib.ExitStack, host: str) -> int:
    return stack.enter_context(closing_fd(os.open(host, os.O_RDONLY | os.O_DIRECTORY)))


@dataclass
class _Keeper:
    """One pass over the node's files, below an open folder that is its root."""

    files: HostFiles
    root: str
    state: str | None = None
    _failures: dict[str, str] = field(default_factory=dict)

    def keep(self, wanted: Sequence[PoolSpec], unwanted: Collection[str]) -> BootUnit:
        names = [spec.name for spec in wanted]
        with self._failing_for(*names):
            if wanted:
                self._check_systemd()
            for spec in wanted:
                self._write_script(spec)
        for name in unwanted:
            with self._failing_for(name):
                self.files.remove_ours(_SCRIPTS, f"{name}.sh")
        kept: list[str] = []
        with self._failing_for(*(names or unwanted)):
            kept = self._kept(names)
            write_record(self.state, kept)
            self._write_unit(kept) if kept else self._remove_unit()
        return BootUnit(tuple(kept), tuple(self._failures.items()))

    @contextlib.contextmanager
    def _failing_for(self, *pools: str) -> Iterator[None]:
        try:
            yield
        except (HostprepError, OSError) as error:
            for pool in pools:
                self._failures.setdefault(pool, _said(_ours(error)))

    def _check_systemd(self) -> None:
        try:
            os.close(self.files.open("run/systemd/system"))
        except FileNotFoundError:
            here = "" if sees_all_processes() else ", as far as can be seen without hostPID"
            raise NotReadyError(
                f"no systemd runs on the node{here}", reason="NoSystemd", remedy=_BY_HAND[3:]
            ) from None

    def _write_script(self, spec: PoolSpec) -> None:
        with self._failing_for(spec.name):
            text = boot_script(spec, root=self.root)
            self.files.write_ours(_SCRIPTS, f"{spec.name}.sh", text)

    def _write_unit(self, kept: Sequence[str]) -> None:
        text = systemd_unit(*(f"/{_SCRIPTS}/{name}.sh" for name in kept))
        self.files.write_ours(_UNITS, UNIT, text)
        with closing_fd(self.files.open(_WANTS, make=True)) as folder:
            if _link(folder) != _TARGET:
                try:
                    os.symlink(_TARGET, UNIT, dir_fd=folder)
                except FileExistsError:
                    raise not_ours(f"{_WANTS}/{UNIT}") from None
                os.fsync(folder)

    def _remove_unit(self) -> None:
        if not self.files.is_anothers(_UNITS, UNIT):
            # Where a link leads elsewhere on the way (NixOS), nothing of ours was ever put.
            with where_we_write(), closing_fd(self.files.open(_WANTS)) as folder:
                if _link(folder) == _TARGET:
                    os.unlink(UNIT, dir_fd=folder)
        self.files.remove_ours(_UNITS, UNIT)
        self.files.remove_if_empty(_SCRIPTS)

    def _kept(self, names: Sequence[str]) -> list[str]:
        """Return the pools whose scripts of ours stand, those that were asked for first.

        Raises OSError: what cannot be read is not taken for missing, or the unit would go.
        """
        files: list[str] = []
        with where_we_write(), closing_fd(self.files.open(_SCRIPTS)) as folder:
            files = [name for name in sorted(os.listdir(folder)) if name.endswith(".sh")]
        ours = [file[:-3] for file in files if self.files.is_ours(_SCRIPTS, file)]
        return [*(n for n in names if n in ours), *(n for n in ours if n not in names)]


def _ours(error: HostprepError | OSError) -> HostprepError:
    if isinstance(error, HostprepError):
        return error
    return from_os_error(error, f"change {error.filename or 'the boot unit'}")


def _said(error: HostprepError) -> str:
    """Return why, with a remedy that fits: those of the files speak of --root."""
    if error.reason in _OF_FILES:
        return f"{error.message}; let the agent write there, {_BY_HAND}"
    return str(error)


def _left_behind(pool: str, error: HostprepError, state: str) -> str:
    """Return why a script stays, and what to do, where the node's files cannot be reached."""
    return (
        f"/{_SCRIPTS}/{pool}.sh may still reserve pages at every boot: {error.message}; give the"
        " agent agent.hostPID=true and agent.mode=privileged, or remove the script yourself, and"
        f" then its line in {state}/{FILE_NAME}"
    )


def _link(folder: int) -> str | None:
    try:
        return os.readlink(UNIT, dir_fd=folder)
    except OSError:
        return None
