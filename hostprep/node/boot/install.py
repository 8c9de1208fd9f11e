"""`boot: Systemd`: the node's own copy of the boot scripts, and the one unit that runs them.

Only files that begin with our mark are ever changed or removed. systemd is not notified: it reads
the unit at the next boot, which is when there is something to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from hostprep.api.pool_spec import PoolSpec
from hostprep.errors import HostprepError, NotReadyError
from hostprep.linux import processes
from hostprep.linux.files import (
    atomic_write,
    closing_fd,
    from_os_error,
    open_beneath,
    open_state_file,
    read_limited,
    remove_file,
)
from hostprep.linux.processes import sees_all_processes
from hostprep.node.boot.script import boot_script, systemd_unit

UNIT = "hostprep-boot.service"
_SCRIPTS = "etc/hostprep"
_UNITS = "etc/systemd/system"
_WANTS = f"{_UNITS}/multi-user.target.wants"
_TARGET = f"/{_UNITS}/{UNIT}"
_OF_FILES = ("NoPermission", "ReadOnly", "NoSpace", "BadRoot", "Failed")
_BY_HAND = "or put the script on the node yourself: hostprep boot --script"
_MARK = "# Kept by the Hostprep agent, which changes and removes it: what you edit here is lost.\n"
_MAX_BYTES = 1 << 20
_NO_FILE_OF_OURS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV)
"""What open(2) says of a path at which no regular file can be opened without following a link."""
_RECORD_NAME = "boot-scripts"
"""In the agent's state folder, which outlives the boot: one pool a line.

An agent without hostPID sees neither the scripts nor the unit that an earlier one with it wrote,
and they reserve pages at every boot. The record is written after the scripts, from what stands on
the node: each sync that reaches the node corrects it.
"""


@dataclass(frozen=True, slots=True)
class BootUnit:
    """What the node will do at its next boot, and what failed."""

    pools: tuple[str, ...] = ()
    """Whose scripts the unit runs, in that order."""
    failures: tuple[tuple[str, str], ...] = ()
    """(pool, why and what to do)."""


def host_folder() -> str:
    """Return where the node's own files lie: below PID 1's root where we have another.

    Raises NotReadyError where they cannot be reached.
    """
    try:
        return processes.host_folder()
    except OSError as error:
        raise NotReadyError(
            f"the node's files cannot be reached ({error.strerror})",
            reason="NoHostFiles",
            remedy=f"give the agent agent.hostPID=true and agent.mode=privileged, {_BY_HAND}",
        ) from error


def sync_boot_unit(
    wanted: Sequence[PoolSpec],
    unwanted: Collection[str],
    *,
    root: str,
    host: str | None = None,
    state: str | None = None,
) -> BootUnit:
    """Write the scripts of `wanted` and the unit to the node, and remove those of `unwanted`.

    Scripts of pools in neither stay. Files that are right are not written again. Never raises:
    failures are in the result, pool by pool. `host` is the node's root folder, found by
    `host_folder` if it is None. `state` is the agent's state folder: where the node cannot be
    reached, its record names those of `unwanted` that may still have a script there.
    """
    if not wanted and not unwanted:
        return BootUnit()
    try:
        fd = os.open(host or host_folder(), os.O_RDONLY | os.O_DIRECTORY)
        with closing_fd(fd):
            sync = _BootUnitSync(_HostFiles(fd), root, state)
            return sync.run(sorted(wanted, key=lambda spec: -spec.priority), unwanted)
    except (HostprepError, OSError) as caught:
        error = _as_hostprep_error(caught)
        failures = [(spec.name, _with_remedy(error)) for spec in wanted]
        left = sorted(_read_record(state).intersection(unwanted))
        failures += [(name, _left_behind(name, error, str(state))) for name in left]
        return BootUnit(failures=tuple(failures))


@dataclass
class _BootUnitSync:
    """One pass over the node's files, below an open folder that is its root."""

    files: _HostFiles
    root: str
    state: str | None = None
    _failures: dict[str, str] = field(default_factory=dict)

    def run(self, wanted: Sequence[PoolSpec], unwanted: Collection[str]) -> BootUnit:
        names = [spec.name for spec in wanted]
        with self._failures_of(*names):
            if wanted:
                self._check_systemd()
            for spec in wanted:
                with self._failures_of(spec.name):
                    text = boot_script(spec, root=self.root)
                    self.files.write_ours(_SCRIPTS, f"{spec.name}.sh", text)
        for name in unwanted:
            with self._failures_of(name):
                self.files.remove_ours(_SCRIPTS, f"{name}.sh")
        kept: list[str] = []
        with self._failures_of(*(names or unwanted)):
            kept = self._kept(names)
            _write_record(self.state, kept)
            self._write_unit(kept) if kept else self._remove_unit()
        return BootUnit(tuple(kept), tuple(self._failures.items()))

    @contextlib.contextmanager
    def _failures_of(self, *pools: str) -> Iterator[None]:
        try:
            yield
        except (HostprepError, OSError) as error:
            for pool in pools:
                self._failures.setdefault(pool, _with_remedy(_as_hostprep_error(error)))

    def _check_systemd(self) -> None:
        try:
            os.close(self.files.open("run/systemd/system"))
        except FileNotFoundError:
            here = "" if sees_all_processes() else ", as far as can be seen without hostPID"
            raise NotReadyError(
                f"no systemd runs on the node{here}", reason="NoSystemd", remedy=_BY_HAND[3:]
            ) from None

    def _write_unit(self, kept: Sequence[str]) -> None:
        text = systemd_unit(*(f"/{_SCRIPTS}/{name}.sh" for name in kept))
        self.files.write_ours(_UNITS, UNIT, text)
        with closing_fd(self.files.open(_WANTS, make=True)) as folder:
            if _link(folder) != _TARGET:
                try:
                    os.symlink(_TARGET, UNIT, dir_fd=folder)
                except FileExistsError:
                    raise _not_ours(f"{_WANTS}/{UNIT}") from None
                os.fsync(folder)

    def _remove_unit(self) -> None:
        if not self.files.is_foreign(_UNITS, UNIT):
            # Where a link leads elsewhere on the way (NixOS), nothing of ours was ever put.
            with _ours_only(), closing_fd(self.files.open(_WANTS)) as folder:
                if _link(folder) == _TARGET:
                    os.unlink(UNIT, dir_fd=folder)
        self.files.remove_ours(_UNITS, UNIT)
        self.files.remove_if_empty(_SCRIPTS)

    def _kept(self, names: Sequence[str]) -> list[str]:
        """Return the pools whose scripts of ours stand, those that were asked for first.

        Raises OSError: what cannot be read is not taken for missing, or the unit would go.
        """
        files: list[str] = []
        with _ours_only(), closing_fd(self.files.open(_SCRIPTS)) as folder:
            files = sorted(name for name in os.listdir(folder) if name.endswith(".sh"))
        ours = [file[:-3] for file in files if self.files.is_ours(_SCRIPTS, file)]
        return [*(n for n in names if n in ours), *(n for n in ours if n not in names)]


def _as_hostprep_error(error: HostprepError | OSError) -> HostprepError:
    if isinstance(error, HostprepError):
        return error
    return from_os_error(error, f"change {error.filename or 'the boot unit'}")


def _with_remedy(error: HostprepError) -> str:
    """Return why, with a remedy that fits: file errors name --root in theirs."""
    if error.reason in _OF_FILES:
        return f"{error.message}; let the agent write there, {_BY_HAND}"
    return str(error)


def _left_behind(pool: str, error: HostprepError, state: str) -> str:
    """Return why a script stays, and what to do, where the node's files cannot be reached."""
    return (
        f"/{_SCRIPTS}/{pool}.sh may still reserve pages at every boot: {error.message}; give the"
        " agent agent.hostPID=true and agent.mode=privileged, or remove the script yourself, and"
        f" then its line in {state}/{_RECORD_NAME}"
    )


def _link(folder: int) -> str | None:
    try:
        return os.readlink(UNIT, dir_fd=folder)
    except OSError:
        return None


class _NotOursError(NotReadyError):
    """A file or link that is not the agent's is in the way."""


def _not_ours(path: str) -> _NotOursError:
    """Return the error for a path, relative to the node's root, that is not the agent's."""
    return _NotOursError(
        f"/{path} is not the agent's",
        reason="ForeignFile",
        remedy="move it away, or set boot: None",
    )


def _ours_only() -> contextlib.AbstractContextManager[None]:
    """Skip folders that do not exist, or that are not the agent's to write to."""
    return contextlib.suppress(FileNotFoundError, _NotOursError)


@dataclass(frozen=True)
class _HostFiles:
    """The agent's own files below the node's root, an open folder; ours by their first line.

    No link is followed on the way: below PID 1's root an absolute one would lead into the agent's
    own container. Where a link is on the way, no file of ours can be.
    """

    root: int

    def is_ours(self, folder: str, name: str) -> bool:
        """Return whether a file there begins with our mark. Raises OSError."""
        return (self._read(folder, name) or b"").startswith(_MARK.encode())

    def is_foreign(self, folder: str, name: str) -> bool:
        """Return whether something there is not ours. Raises OSError."""
        try:
            with closing_fd(self.open(folder)) as fd:
                there = _exists(fd, name)
        except (FileNotFoundError, _NotOursError):
            return False
        return there and not self.is_ours(folder, name)

    def _read(self, folder: str, name: str) -> bytes | None:
        """Return a file's bytes, None where there is no such file. Raises OSError.

        Anything but a regular file, or a larger one than we write, has no bytes.
        """
        path = f"{folder}/{name}"
        try:
            fd = open_beneath(self.root, path, os.O_RDONLY | os.O_NONBLOCK)
        except NotReadyError:  # a link
            return b""
        except OSError as error:
            if error.errno in _NO_FILE_OF_OURS:
                return None if error.errno == errno.ENOENT else b""
            raise
        with closing_fd(fd):
            try:
                return read_limited(fd, _MAX_BYTES)
            except NotReadyError:
                return b""

    def write_ours(self, folder: str, name: str, text: str) -> None:
        """Write our mark and `text` to a file, and make missing folders; no-op where it is right.

        Raises NotReadyError where a foreign file is in the way, HostprepError, OSError.
        """
        data = (_MARK + text).encode()
        before = self._read(folder, name)
        if before == data:
            return
        if before is not None and not before.startswith(_MARK.encode()):
            raise _not_ours(f"{folder}/{name}")
        with closing_fd(self.open(folder, make=True)) as fd, _named(fd, f"/{folder}"):
            atomic_write(f"/proc/self/fd/{fd}/{name}", data)

    def remove_ours(self, folder: str, name: str) -> None:
        """Remove a file if it is ours, and what a killed run left of one."""
        unfinished = f".{name}.new"
        with _ours_only(), closing_fd(self.open(folder)) as fd, _named(fd, f"/{folder}"):
            # Looked for first: on a read-only file system unlink(2) refuses what is not there.
            gone = [unfinished] if _exists(fd, unfinished) else []
            gone += [name] if self.is_ours(folder, name) else []
            for one in gone:
                remove_file(f"/proc/self/fd/{fd}/{one}")
            if gone:
                os.fsync(fd)

    def remove_if_empty(self, folder: str) -> None:
        """Remove an empty folder."""
        parent, _, name = folder.rpartition("/")
        with contextlib.suppress(OSError), closing_fd(self.open(parent)) as fd:
            os.rmdir(name, dir_fd=fd)

    def open(self, folder: str, *, make: bool = False) -> int:
        """Open a folder of the node, following no link: links there are relative to its root.

        Raises _NotOursError for a link on the way, OSError.
        """
        try:
            return open_beneath(self.root, folder, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if not make:
                raise
        except NotReadyError as error:
            raise _not_ours(folder) from error
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise _not_ours(folder) from error
            raise
        parent, _, name = folder.rpartition("/")
        with closing_fd(self.open(parent, make=True) if parent else os.dup(self.root)) as fd:
            try:
                os.mkdir(name, 0o755, dir_fd=fd)
            except OSError as error:
                raise from_os_error(error, f"make /{folder}") from error
        return open_beneath(self.root, folder, os.O_RDONLY | os.O_DIRECTORY)


@contextlib.contextmanager
def _named(fd: int, folder: str) -> Iterator[None]:
    """Put the folder's real path into errors."""
    try:
        yield
    except HostprepError as error:
        error.message = error.message.replace(f"/proc/self/fd/{fd}", folder)
        raise


def _exists(folder: int, name: str) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _read_record(folder: str | None) -> frozenset[str]:
    """Return the pools whose scripts stood on the node when it was last reached; none if unknown.

    `folder` is the agent's state folder, or None where there is none.
    """
    if folder is None:
        return frozenset()
    try:
        with closing_fd(open_state_file(f"{folder}/{_RECORD_NAME}", os.O_RDONLY)) as fd:
            return frozenset(read_limited(fd, _MAX_BYTES).decode("utf-8", "replace").split())
    except (HostprepError, OSError):
        return frozenset()


def _write_record(folder: str | None, pools: Collection[str]) -> None:
    """Record which pools have a script, if that changed.

    A full or read-only disk is no failure of the boot unit: the next sync tries again.
    """
    if folder is None or _read_record(folder) == frozenset(pools):
        return
    text = "".join(f"{name}\n" for name in sorted(pools))
    try:
        atomic_write(f"{folder}/{_RECORD_NAME}", text.encode(), mode=0o600)
    except HostprepError:
        return
