"""`boot: systemd`: the node's own copy of the boot scripts, and the one unit that runs them.

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
RECORD_NAME = "boot-scripts"
"""In the agent's state folder, which outlives the boot: one pool a line."""
_MAX_BYTES = 1 << 20


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
        f" then its line in {state}/{RECORD_NAME}"
    )


def _link(folder: int) -> str | None:
    try:
        return os.readlink(UNIT, dir_fd=folder)
    except OSError:
        return None


class _NotOursError(NotReadyError):
    """Something is in the way that the agent did not put there."""


def not_ours(path: str) -> _NotOursError:
    """Return the error for a path, relative to the node's root, where another's thing is."""
    return _NotOursError(
        f"/{path} is not the agent's",
        reason="ForeignFile",
        remedy="move it away, or set boot: none",
    )


def where_we_write() -> contextlib.AbstractContextManager[None]:
    """Pass over folders that are not there, or that we would not write to."""
    return contextlib.suppress(FileNotFoundError, _NotOursError)


@dataclass(frozen=True)
class HostFiles:
    """Files below an open folder that is the node's root."""

    root: int

    def is_ours(self, folder: str, name: str) -> bool:
        """Tell whether a file there begins with our mark. Raises OSError where that is unknown."""
        return (self._read(folder, name) or b"").startswith(_MARK.encode())

    def is_anothers(self, folder: str, name: str) -> bool:
        """Tell whether something there is not ours. Raises OSError where that is unknown."""
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
        """Have our mark and `text` in a file, in folders that are made where they are missing.

        Nothing is written that is there already. Raises NotReadyError where another's file is,
        HostprepError, OSError.
        """
        data = (_MARK + text).encode()
        before = self._read(folder, name)
        if before == data:
            return
        if before is not None and not before.startswith(_MARK.encode()):
            raise not_ours(f"{folder}/{name}")
        with closing_fd(self.open(folder, make=True)) as fd, _named(fd, f"/{folder}"):
            atomic_write(f"/proc/self/fd/{fd}/{name}", data)

    def remove_ours(self, folder: str, name: str) -> None:
        """Remove a file if it is ours, and what a killed run left of one."""
        unfinished = f".{name}.new"
        with where_we_write(), closing_fd(self.open(folder)) as fd, _named(fd, f"/{folder}"):
            # Looked for first: on a read-only file system unlink(2) refuses what is not there.
            gone = [unfinished] if _exists(fd, unfinished) else []
            gone += [name] if self.is_ours(folder, name) else []
            for one in gone:
                remove_file(f"/proc/self/fd/{fd}/{one}")
            if gone:
                os.fsync(fd)

    def remove_if_empty(self, folder: str) -> None:
        """Remove a folder that nobody keeps anything in."""
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
            raise not_ours(folder) from error
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                raise not_ours(folder) from error
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
    """Name the folder in errors as people know it."""
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


def read_record(folder: str | None) -> frozenset[str]:
    """Return the pools whose scripts stood on the node when it was last reached; none if unknown.

    `folder` is the agent's state folder, or None where there is none.
    """
    if folder is None:
        return frozenset()
    try:
        with closing_fd(open_state_file(f"{folder}/{RECORD_NAME}", os.O_RDONLY)) as fd:
            return frozenset(read_limited(fd, _MAX_BYTES).decode("utf-8", "replace").split())
    except (HostprepError, OSError):
        return frozenset()


def write_record(folder: str | None, pools: Collection[str]) -> None:
    """Write down which pools have a script; nothing where that is known already.

    A disk that is full or read-only is no failure of the boot unit: the next round tries again.
    """
    if folder is None or read_record(folder) == frozenset(pools):
        return
    text = "".join(f"{name}\n" for name in sorted(pools))
    try:
        atomic_write(f"{folder}/{RECORD_NAME}", text.encode(), mode=0o600)
    except HostprepError:
        return
