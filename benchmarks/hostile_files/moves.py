"""What an attacker does to files: one move at a time, chosen by a seeded generator.

A move acts on the entry itself: it follows no link and writes to no file with a second name, so
whatever changes outside of the root was changed by those who were attacked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import mmap
import os
import random
import socket
import stat
from collections.abc import Callable, Sequence
from typing import Any

_MAX_READ_BYTES = 1 << 20
_MAX_HELD = 200
_MAX_ENTRIES = 200
_RAW = "RAW NUMBER"
"""Stands for what no encoder writes."""
_RAW_NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "1e-999", "-0")

_NAMES = (
    *("claim.lock", "agent.json", "boot.json", "boot.ledger", "handoff.json"),
    *("users", "lease", "clean", "bad", "board"),
    *("mem", "state", "tickets", "links", "devices", "turnstile", "node", "slot0", "slot1"),
    *("node0-0", "node0-1", ".node0-0.part", "all", "interleave-0"),
    *("1", "00000000000000000002", "9" * 30, "-1", "18446744073709551616"),
    *("\x1b[2J", "line\nfeed", "\udcff\udcfe", "…" * 60, " ", "-rf", "a" * 255, "..x", "~"),
)
_SIZES = (0, 1, 4095, 1 << 20, 1 << 40, (1 << 63) - 1)
_MODES = (0, 0o400, 0o600, 0o660, 0o666, 0o777, 0o4777, 0o2770, 0o1777)

Move = Callable[[str], object]


class Attacker:
    """Makes moves on what lies below some folders, never on those folders themselves.

    `targets` are files that are read, there or not: every fourth move is about one of them.
    `lures` are paths that links and documents lead to, `foreign` files that get a second name.
    Locks, leases, descriptors and mappings are held until the process ends.
    """

    def __init__(
        self,
        rng: random.Random,
        root: str,
        *,
        folders: Sequence[str],
        targets: Sequence[str],
        lures: Sequence[str],
        foreign: Sequence[str],
    ) -> None:
        self._rng = rng
        self._folders = folders
        self._targets = targets
        self._lures = lures
        self._foreign = foreign
        self._root = root
        self._held: list[object] = []
        self._moves: dict[str, tuple[Move, int]] = {
            "truncate": (self._truncate, 4),
            "random bytes": (self._random_bytes, 6),
            "JSON": (self._change_json, 14),
            "nested JSON": (self._nested_json, 2),
            "members": (self._members, 5),
            "link": (self._link, 5),
            "FIFO": (self._fifo, 4),
            "socket": (self._socket, 3),
            "folder": (self._folder, 4),
            "hard link": (self._hard_link, 3),
            "nested folders": (self._nest, 1),
            "many files": (self._many, 1),
            "chmod": (self._chmod, 4),
            "flock": (self._flock, 5),
            "lease": (self._lease, 4),
            "open": (self._open, 3),
            "map": (self._map, 2),
            "delete": (self._delete, 5),
            "rename": (self._rename, 4),
            "swap": (self._swap, 3),
            "copy": (self._copy, 3),
        }

    def move(self) -> tuple[str, str]:
        """Make one move. Returns its kind, or "refused", and what it was."""
        names = list(self._moves)
        weights = [weight for _, weight in self._moves.values()]
        kind = self._rng.choices(names, weights)[0]
        try:
            path = self._rng.choice(self._targets) if self._rng.random() < 0.25 else self._pick()
        except OSError:
            return "refused", f"{kind}: nothing that may be seen"
        if self._rng.random() < 0.2:  # something where nothing is, or another name's place
            path = f"{os.path.dirname(path)}/{self._rng.choice(_NAMES)}"
        shown = f"{kind} {os.path.relpath(path, self._root)[:90]!a}"
        if self._leads_out(path):
            return "refused", shown
        try:
            what = self._moves[kind][0](path)
        except (OSError, ValueError) as error:
            why = errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else ""
            return "refused", f"{shown}: {why or type(error).__name__}"
        return kind, f"{shown} {'' if what is None else ascii(what)[:160]}".rstrip()

    def _pick(self) -> str:
        """Return an entry below one of the folders: a walk that follows no link."""
        path = self._rng.choice(self._folders)
        is_below = False
        while not is_below or self._rng.random() < 0.85:
            try:
                with os.scandir(path) as entries:
                    names = sorted(entry.name for entry in itertools.islice(entries, _MAX_ENTRIES))
            except OSError:
                names = []
            if not names:
                return path if is_below else f"{path}/{self._rng.choice(_NAMES)}"
            path = f"{path}/{self._rng.choice(names)}"
            is_below = True
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                break
        return path

    def _leads_out(self, path: str) -> bool:
        """Tell whether a link on the way leads to what this attacker's rights are not for."""
        folder = f"{os.path.realpath(os.path.dirname(path))}/"
        return not any(folder.startswith(f"{inside}/") for inside in self._folders)

    def _writable(self, path: str) -> int:
        """Open a regular file that has no other name; make it where there is none."""
        fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o660
        )
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(fd)
            raise ValueError(path)
        return fd

    def _write(self, path: str, data: bytes) -> None:
        """Replace a file's content, in place or by another file."""
        if self._rng.random() < 0.5:
            self._clear(path)
        fd = self._writable(path)
        try:
            os.ftruncate(fd, 0)
            os.write(fd, data)
            with contextlib.suppress(OSError):
                os.fchmod(fd, self._rng.choice((0o660, 0o666)))
        finally:
            os.close(fd)

    def _read(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(fd, _MAX_READ_BYTES)
        finally:
            os.close(fd)

    def _clear(self, path: str) -> None:
        """Take away what is at a path; a folder that is not empty goes aside."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            aside = f"{os.path.dirname(path)}/aside-{self._rng.randrange(1 << 30)}"
            os.rename(path, aside)

    # --- contents

    def _truncate(self, path: str) -> object:
        size = self._rng.choice(_SIZES)
        fd = self._writable(path)
        try:
            os.ftruncate(fd, size)
        finally:
            os.close(fd)
        return size

    def _random_bytes(self, path: str) -> object:
        fd = self._writable(path)
        try:
            size = min(os.fstat(fd).st_size, 1 << 23)
            offset = self._rng.randrange(size + 1)
            count = self._rng.choice((1, 8, 64, 4096, 65536))
            os.pwrite(fd, self._rng.randbytes(count), offset)
        finally:
            os.close(fd)
        return (offset, count)

    def _change_json(self, path: str) -> object:
        document: Any
        try:
            document = json.loads(self._read(path).decode("utf-8"))
        except (OSError, ValueError, RecursionError):
            document = self._lease_document()
        key, value = self._change(document)
        text = json.dumps(document, ensure_ascii=self._rng.random() < 0.7)
        text = text.replace(f'"{_RAW}"', self._rng.choice(_RAW_NUMBERS))
        self._write(path, text.encode("utf-8", "surrogatepass"))
        return (key, ascii(value)[:80])

    def _change(self, document: Any) -> tuple[object, object]:
        """Change one member of a document, at any depth."""
        value = self._odd_value()
        key: object = None
        while isinstance(document, (dict, list)) and document:
            keys = list(document) if isinstance(document, dict) else list(range(len(document)))
            key = self._rng.choice(keys)
            below = document[key]
            if not isinstance(below, (dict, list)) or not below or self._rng.random() < 0.3:
                document[key] = value
                break
            document = below
        return key, value

    def _odd_value(self) -> Any:
        lure = self._rng.choice(self._lures)
        nested: list[Any] = []
        for _ in range(500):
            nested = [nested]
        return self._rng.choice(
            (
                *("/tmp/a\0b", "/tmp/\ud800", "\x1b[2J\x1b]0;title\x07", "a\nb\rc", "x" * 100_000),
                *(_RAW, _RAW, 10**30, 1 << 63, (1 << 64) - 1, -1, 0, 1, 1e308, 0.5),
                *(True, None, [], {}, [None], {"a": None}, "", "/", ".", "..", lure, [lure]),
                *(f"../../{os.path.basename(lure)}", "../bystander/mem/node0-0", "mem/../mem"),
                *(
                    nested,
                    [lure, "/tmp/a\0b", "/tmp/\ud800", None],
                    [lure] * 5000,
                    [0] * 5000,
                    "node:0",
                    "node:99999999999",
                    "\u202e",
                ),
            )
        )

    def _lease_document(self) -> dict[str, Any]:
        pid, ticks, namespace = self._process()
        return {
            "lease_id": "0" * 32,
            "pid": pid,
            "start_ticks": ticks,
            "pid_namespace": namespace,
            "command": "engine --serve",
            "claimed_at_s": 1.0,
            "owner": {"token_sha256": "0" * 64, "identity": {"model": "m"}},
            "links": [self._rng.choice(self._lures)],
        }

    def _process(self) -> tuple[int, int, int]:
        """Return a process of this machine: the first one, ourselves, or none."""
        pid = self._rng.choice((1, os.getpid(), 4_000_000))
        ticks = 0
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return pid, ticks, os.stat("/proc/self/ns/pid").st_ino

    def _nested_json(self, path: str) -> object:
        depth = self._rng.choice((990, 5000, 100_000))
        opening = self._rng.choice((b"[", b'{"a":'))
        self._write(path, opening * depth)
        return depth

    def _members(self, path: str) -> object:
        """Write lines as `users` has them: of living processes, dead ones and impossible ones."""
        count = self._rng.choice((1, 3, 3000))
        odd = ("0", "-1", "9" * 40, "1e5", "٣", "\x1b[1m", "")
        lines = []
        for _ in range(count):
            pid, ticks, namespace = (
                self._process() if count < 10 else (self._rng.randrange(9), 1, 1)
            )
            words = [self._rng.choice("+-?"), str(pid), str(ticks), str(namespace)]
            if self._rng.random() < 0.3:
                words[self._rng.randrange(4)] = self._rng.choice(odd)
            lines.append(" ".join(words))
        self._write(path, "\n".join([*lines, ""]).encode())
        return count

    # --- kinds

    def _link(self, path: str) -> object:
        near = ("../handoff.json", ".", "..", os.path.basename(path), "nowhere/at/all", "/dev/zero")
        target = self._rng.choice((*self._lures, *near))
        self._clear(path)
        os.symlink(target, path)
        return os.path.basename(target)

    def _fifo(self, path: str) -> object:
        self._clear(path)
        os.mkfifo(path, 0o666)
        return None

    def _socket(self, path: str) -> object:
        self._clear(path)
        listener = socket.socket(socket.AF_UNIX)
        try:
            # By a short name: an address has 108 bytes at most.
            folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
            try:
                listener.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
            finally:
                os.close(folder)
        finally:
            listener.close()
        return None

    def _folder(self, path: str) -> object:
        self._clear(path)
        os.mkdir(path, self._rng.choice((0o777, 0o700, 0o000)))
        if self._rng.random() < 0.5:
            self._plain_file(f"{path}/{self._rng.choice(_NAMES)}")
        return None

    def _hard_link(self, path: str) -> object:
        other = self._rng.choice((*self._foreign, self._pick(), self._pick()))
        self._clear(path)
        os.link(other, path, follow_symlinks=False)
        return os.path.basename(other)

    def _nest(self, path: str) -> object:
        self._clear(path)
        depth = self._rng.choice((20, 20, 1500, 1500, 12_000))
        os.mkdir(path, 0o777)
        current = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for _ in range(depth):
                os.mkdir("d", 0o777, dir_fd=current)
                below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=current)
                os.close(current)
                current = below
        finally:
            os.close(current)
        return depth

    def _many(self, path: str) -> object:
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        folder = path if is_folder else os.path.dirname(path)
        count = self._rng.choice((10, 100, 100, 1000, 6000))
        stem = self._rng.choice(("", "junk", "1", "node0-"))
        for number in range(count):
            self._plain_file(f"{folder}/{stem}{number + 1}")
        return count

    def _plain_file(self, path: str) -> None:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))

    def _chmod(self, path: str) -> object:
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode) or (status.st_nlink > 1 and stat.S_ISREG(status.st_mode)):
            raise ValueError(path)
        mode = self._rng.choice(_MODES)
        os.chmod(path, mode)
        return oct(mode)

    # --- what is held

    def _hold(self, fd: int) -> None:
        self._held.append(fd)
        if len(self._held) > _MAX_HELD:
            first = self._held.pop(0)
            if isinstance(first, int):
                os.close(first)

    def _flock(self, path: str) -> object:
        if self._rng.random() < 0.2:
            path = os.path.dirname(path)
        shared = self._rng.random() < 0.3
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        self._hold(fd)
        return "shared" if shared else None

    def _lease(self, path: str) -> object:
        """Take a write lease: whoever opens the file waits for its end, or is refused."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        kind = self._rng.choice((fcntl.F_RDLCK, fcntl.F_WRLCK))
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, kind)
        except OSError:
            os.close(fd)
            raise
        self._hold(fd)
        return "read" if kind == fcntl.F_RDLCK else "write"

    def _open(self, path: str) -> None:
        self._hold(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))

    def _map(self, path: str) -> object:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = min(os.fstat(fd).st_size, 1 << 23)
            self._held.append(mmap.mmap(fd, size))
        finally:
            os.close(fd)
        return size

    # --- names

    def _delete(self, path: str) -> None:
        try:
            os.unlink(path)
        except IsADirectoryError:
            os.rmdir(path)

    def _rename(self, path: str) -> object:
        target = self._pick()
        if self._rng.random() < 0.4:
            target = f"{os.path.dirname(path)}/{self._rng.choice(_NAMES)}"
        if self._leads_out(target):
            raise ValueError(target)
        os.rename(path, target)
        return os.path.relpath(target, self._root)

    def _swap(self, path: str) -> object:
        target = self._pick()
        aside = f"{path}.swap"
        if self._leads_out(target):
            raise ValueError(target)
        os.rename(path, aside)
        with contextlib.suppress(OSError):
            os.rename(target, path)
        os.rename(aside, target)
        return os.path.relpath(target, self._root)

    def _copy(self, path: str) -> object:
        source = self._pick()
        self._write(path, self._read(source))
        return os.path.relpath(source, self._root)
