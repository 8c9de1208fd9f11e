"""The small files beside a region: its holder, who joined, and whether it is clean or bad."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hostprep.client.handoff import Region
from hostprep.client.owner import OwnerRecord
from hostprep.client.untrusted import (
    Fields,
    open_file,
    printable,
    read_file,
    read_object,
    read_tail,
)
from hostprep.errors import NotReadableError
from hostprep.linux.files import (
    atomic_write,
    closing_fd,
    remove_file,
    replace_by_folder,
)
from hostprep.linux.processes import ProcessId, current_process, first_alive, is_of_our_namespace
from hostprep.paths import PoolPaths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


MAX_MEMBERS = 4096
MAX_MEMBERS_BYTES = 1 << 20
_MAX_LEASE_ID = 64
_MAX_LINKS = 64
_LAST_S = 2.0**40
"""A time that no clock shows any more."""
_SHOWN_ARGUMENTS = 3
_MAX_BAD_TEXT = 400
_MAX_BAD_BYTES = 4096
_MAX_SIZE_DIGITS = 17


@dataclass(frozen=True)
class Sidecar:
    """The holder, or last holder, of a region: a lock does not name it."""

    lease_id: str
    holder: ProcessId
    command: str
    claimed_at_s: float
    owner: OwnerRecord | None = None
    links: tuple[str, ...] = ()
    """Paths of the engine's choice that lead to the region while the lease lives."""
    waited_s: float | None = None
    """From asking for a region to holding its lock; None in those of earlier versions."""

    @property
    def kept_since_s(self) -> float:
        """When the owner first claimed the region, by the clock; 0 where it is not known.

        Earlier versions noted the last claim only.
        """
        return (self.owner.since_s if self.owner else 0.0) or self.claimed_at_s


def make_state_folder(paths: PoolPaths, region: str) -> None:
    """Make the folder of a region's small files, or give it the access that it should have.

    As the pool's own folder: its group's, and closed to others, or readable by everybody. Raises
    OSError.
    """
    pool = os.stat(paths.folder)
    shared = not pool.st_mode & stat.S_IXOTH
    replace_by_folder(paths.state, mode=0o750 if shared else 0o755, gid=pool.st_gid)
    replace_by_folder(paths.state_of(region), mode=0o2770 if shared else 0o755, gid=pool.st_gid)


def has_state_folder(paths: PoolPaths, region: str) -> bool:
    """Tell whether the region's small files lie in a folder of the pool's.

    A link in its place, which root alone can leave there, leads to somebody else's files.
    """
    try:
        modes = [os.lstat(path).st_mode for path in (paths.state, paths.state_of(region))]
    except OSError:
        return False
    return all(map(stat.S_ISDIR, modes))


def new_sidecar(
    lease_id: str,
    owner: OwnerRecord | None,
    links: Sequence[str] = (),
    *,
    waited_s: float | None = None,
) -> Sidecar:
    """Return the sidecar of a lease that this process takes now."""
    # The first arguments name the program; later ones may hold secrets, and this file stays.
    command = " ".join(_arguments("self")[:_SHOWN_ARGUMENTS])[:120]
    links = tuple(links)
    return Sidecar(lease_id, current_process(), command, time.time(), owner, links, waited_s)


def current_command(sidecar: Sidecar) -> str:
    """Return what the holder runs now: `hostprep exec` has become something else since.

    The recorded command, where the holder is not visible from here. All arguments: they may hold
    secrets, and are for this node alone.
    """
    return printable(" ".join(_live_arguments(sidecar)).strip() or sidecar.command)


def short_command(sidecar: Sidecar, *, limit: int = 60) -> str:
    """Return the first arguments of what the holder runs now, fit to be published.

    At most `limit` characters, cut at the end of a word wherever there is one.
    """
    words = " ".join(_live_arguments(sidecar)[:_SHOWN_ARGUMENTS]).split() or sidecar.command.split()
    text = printable(" ".join(words))
    if len(text) <= limit:
        return text
    return text[: limit + 1].rpartition(" ")[0] or text[:limit]


def _live_arguments(sidecar: Sidecar) -> list[str]:
    """Return the command line of a holder that lives and is visible; else nothing."""
    holder = sidecar.holder
    if not is_of_our_namespace(holder) or first_alive([holder]) is None:
        return []
    try:
        return _arguments(str(holder.pid))
    except OSError:
        return []


def _arguments(entry: str) -> list[str]:
    with open(f"/proc/{entry}/cmdline", "rb") as file:
        return file.read(4096).decode("utf-8", "replace").split("\0")


def write_sidecar(paths: PoolPaths, region: str, sidecar: Sidecar, *, gid: int) -> None:
    """Replace the region's sidecar; the caller holds the region's lock."""
    document = {
        "lease_id": sidecar.lease_id,
        "pid": sidecar.holder.pid,
        "start_ticks": sidecar.holder.start_ticks,
        "pid_namespace": sidecar.holder.namespace,
        "command": sidecar.command,
        "claimed_at_s": sidecar.claimed_at_s,
        "owner": sidecar.owner.to_json() if sidecar.owner else None,
        "links": list(sidecar.links),
        "waited_s": sidecar.waited_s,
    }
    _write_json(paths.sidecar(region), document, gid=gid)


def read_sidecar(paths: PoolPaths, region: str) -> Sidecar | None:
    """Return the region's sidecar; None where there is none that can be read."""
    try:
        fields = read_object(paths.sidecar(region))
        return Sidecar(
            lease_id=fields.word("lease_id", most=_MAX_LEASE_ID),
            holder=ProcessId(
                fields.integer("pid"),
                fields.integer("start_ticks"),
                fields.integer("pid_namespace"),
            ),
            command=fields.text("command"),
            claimed_at_s=fields.number("claimed_at_s", most=_LAST_S),
            owner=OwnerRecord.from_json(fields.get("owner")),
            links=fields.texts("links", most=_MAX_LINKS),
            waited_s=_optional_s(fields, "waited_s"),
        )
    except NotReadableError:
        return None


def _optional_s(fields: Fields, key: str) -> float | None:
    """Return seconds; None where there are none. Raises NotReadableError."""
    return None if fields.get(key) is None else fields.number(key, most=_LAST_S)


def add_member(paths: PoolPaths, region: str, *, leaving: bool = False) -> None:
    """Record a process that joins (or leaves) the lease: a scrub waits for its end too."""
    me = current_process()
    line = f"{'-' if leaving else '+'} {me.pid} {me.start_ticks} {me.namespace}\n".encode()
    # One short O_APPEND write: joiners need no lock among themselves.
    with closing_fd(open_file(paths.users_lock(region), os.O_WRONLY | os.O_APPEND)) as fd:
        os.write(fd, line)


def forget_members(paths: PoolPaths, region: str) -> None:
    """Forget the processes that joined earlier leases: the region is quiescent and scrubbed."""
    with closing_fd(open_file(paths.users_lock(region), os.O_RDWR)) as fd:
        os.ftruncate(fd, 0)


def read_members(paths: PoolPaths, region: str) -> tuple[ProcessId, ...]:
    """Return the processes that joined since the region was last scrubbed, and did not leave.

    The newest MAX_MEMBERS of them, as the last MAX_MEMBERS_BYTES tell: the file grows with every
    process that joins or leaves, and any engine may write to it. An older process that is still
    there holds its lock.
    """
    try:
        data = read_tail(paths.users_lock(region), MAX_MEMBERS_BYTES)
    except NotReadableError:
        return ()
    joined: dict[ProcessId, int] = {}
    for line in data.decode("ascii", "replace").splitlines():
        sign, *numbers = line.split() or [""]
        if (
            sign not in ("+", "-")
            or len(numbers) != 3
            or not all(_is_number(number) for number in numbers)
        ):
            continue
        member = ProcessId(*(int(number) for number in numbers))
        times = joined.pop(member, 0) + (1 if sign == "+" else -1)
        if times > 0:
            joined[member] = times  # at the end: it is the newest
    return tuple(joined)[-MAX_MEMBERS:]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 20


def retire(paths: PoolPaths, region: str, lease_id: str, *, gid: int) -> None:
    """Record, while still holding the lease, that its holder unmapped and releases it.

    Otherwise the region would count as in use until the holder's process ends, as it must for
    one that died: a driver may then still be unpinning.
    """
    sidecar = read_sidecar(paths, region)
    if sidecar is not None and sidecar.lease_id == lease_id:
        write_sidecar(paths, region, replace(sidecar, holder=NO_PROCESS), gid=gid)


NO_PROCESS = ProcessId(0, 0, 0)


def mark_clean(paths: PoolPaths, region: str, *, st_dev: int, st_ino: int, gid: int) -> None:
    """State that the region is all zeros. The mark names the inode: a new file has a new one."""
    _write_json(paths.clean_mark(region), {"st_dev": st_dev, "st_ino": st_ino}, gid=gid)


def mark_dirty(paths: PoolPaths, region: str) -> None:
    """Remove the mark; before the first byte can be written, so that a crash errs safely."""
    remove_file(paths.clean_mark(region))


def is_clean(paths: PoolPaths, region: Region) -> bool:
    """Tell whether the region is known to be all zeros; not knowing is dirty."""
    try:
        fields = read_object(paths.clean_mark(region.name))
    except NotReadableError:
        return False
    return (fields.get("st_dev"), fields.get("st_ino")) == (region.st_dev, region.st_ino)


@dataclass(frozen=True)
class KeptMark:
    """What root noted of a region that is kept without a holder."""

    since_s: float
    """When it was first seen without one, by the clock."""
    most_s: float | None = None
    """The pool's `retention.maxAgeSeconds`; None: no limit, or none that is known."""

    def is_over(self, now_s: float) -> bool:
        """Tell whether the pool allows no more that the owner gets its bytes."""
        return self.most_s is not None and now_s - self.since_s >= self.most_s


def read_kept_mark(paths: PoolPaths, region: str, lease_id: str) -> KeptMark | None:
    """Return the mark that was made after that lease's end; None where there is none."""
    try:
        fields = read_object(paths.kept_mark(region))
        if fields.get("lease_id") != lease_id:
            return None
        has_limit = fields.get("most_s") is not None  # earlier versions wrote none
        return KeptMark(
            fields.number("since_s", most=_LAST_S),
            fields.number("most_s", most=_LAST_S) if has_limit else None,
        )
    except NotReadableError:
        return None


def mark_kept(paths: PoolPaths, region: str, lease_id: str, mark: KeptMark, *, gid: int) -> None:
    """State since when the region is kept: a holder that was killed wrote nothing."""
    document = {"lease_id": lease_id, "since_s": mark.since_s, "most_s": mark.most_s}
    _write_json(paths.kept_mark(region), document, gid=gid)


def mark_bad(paths: PoolPaths, region: str, why: str, *, size_bytes: int) -> None:
    """State that the region may not be handed out: it is rebuilt once no process uses it.

    `size_bytes` is its published size, which a file that was shrunk no longer has.
    Raises FailedError.
    """
    text = " ".join(why.split())[:_MAX_BAD_TEXT]
    atomic_write(paths.bad_mark(region), f"{text}\n{size_bytes}\n".encode())


def read_bad_mark(paths: PoolPaths, region: str) -> str | None:
    """Return what is wrong with a region that was marked bad; None for any other."""
    if not os.path.lexists(paths.bad_mark(region)):
        return None
    return _bad_lines(paths, region)[0].strip() or "a bad page"


def read_bad_size(paths: PoolPaths, region: str) -> int:
    """Return a bad region's published size in bytes; 0 where it is not known."""
    text = _bad_lines(paths, region)[1]
    return int(text) if _is_number(text) and len(text) <= _MAX_SIZE_DIGITS else 0


def _bad_lines(paths: PoolPaths, region: str) -> list[str]:
    try:
        text = read_file(paths.bad_mark(region), _MAX_BAD_BYTES).decode("utf-8", "replace")
    except NotReadableError:
        text = ""
    return [*map(printable, text.split("\n")), "", ""][:2]


def _write_json(path: str, document: dict[str, Any], *, gid: int) -> None:
    """Replace the file; it gets the group where this process may give it."""
    may = os.geteuid() == 0 or gid in os.getgroups() or gid == os.getegid()
    atomic_write(path, json.dumps(document).encode(), mode=0o660, gid=gid if may else None)
