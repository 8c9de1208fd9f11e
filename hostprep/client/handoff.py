"""The handoff: the published file that names the memory, its reader, and its verification."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hostprep.backing import MIB, Backing
from hostprep.errors import BadInputError, FailedError, HostprepError, NotReadyError
from hostprep.linux.files import (
    check_relative,
    closing_fd,
    from_os_error,
    open_beneath,
    open_folder,
    open_own_folder,
    read_limited,
)
from hostprep.linux.processes import boot_id as this_boot
from hostprep.paths import PoolPaths, check_pool_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SCHEMA = "hostprep.dev/handoff/v1"

MAX_BYTES = 4 << 20
"""A region takes about 500 bytes: room for far more than MAX_REGIONS of them."""
MAX_REGIONS = 4096

_MAX_INT = (1 << 63) - 1
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,126}[a-z0-9])?", re.ASCII)
_PLACEMENT = re.compile(r"interleave|node:(?:0|[1-9][0-9]{0,4})", re.ASCII)
_REMEDY = "run `hostprep prepare` again"

# O_NONBLOCK: a FIFO put in the file's place must not make the reader wait forever.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK

_WALK_BYTES = 64 << 20
_WINDOW_BYTES = 1 << 30
"""Mapped at once: page tables of 4 KiB pages count against the limit of the walker's cgroup, and
go with the mapping only."""


@dataclass(frozen=True)
class AttachAdvice:
    """What the agent, which knows the node, advises the engine that attaches."""

    register_chunk_bytes: int = 256 * MIB
    """First chunk for cuMemHostRegister; below 512 MiB the driver's table stays small."""
    populate_read_threads: int = 1
    """Threads for MADV_POPULATE_READ of base pages before registering."""
    skip_register: bool = False
    """True where GPUs use the host's page tables (ATS): registering would gain nothing."""


@dataclass(frozen=True)
class Region:
    """One populated file, and everything that an engine can check about it.

    The fields are the handoff's keys, in its order.
    """

    name: str
    path: str
    """Relative to the handoff's folder."""
    st_dev: int
    st_ino: int
    size_bytes: int
    backing: Backing
    page_bytes: int
    placement: str
    """`node:N` or `interleave`."""
    pinned: bool
    layout: Mapping[str, Any] | None = None
    """Offsets of pool groups, where the pool was sized for a model."""
    attach: AttachAdvice = AttachAdvice()

    @property
    def numa_node(self) -> int | None:
        """The node that holds all pages; None if they are interleaved."""
        prefix, _, number = self.placement.partition(":")
        return int(number) if prefix == "node" else None

    def to_json(self) -> dict[str, Any]:
        """Return the region as the handoff holds it."""
        return {**vars(self), "backing": self.backing.value, "attach": {**vars(self.attach)}}


@dataclass(frozen=True)
class Handoff:
    """One pool on one node, as published. The fields are the file's keys, in its order."""

    pool: str
    pool_uid: str
    generation: int
    """Counts publications of this boot that changed something."""
    boot_id: str
    agent_version: str
    regions: tuple[Region, ...]

    def region(self, name: str) -> Region | None:
        """Return the region of that name."""
        return next((region for region in self.regions if region.name == name), None)

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        regions = [region.to_json() for region in self.regions]
        document = {"schema": SCHEMA, **vars(self), "regions": regions}
        return json.dumps(document, indent=1).encode() + b"\n"


def read_handoff(paths: PoolPaths, *, boot_id: str | None = None) -> Handoff:
    """Read and check the pool's handoff, and that it is of this boot and for this pool.

    The regions' files are not checked here: see `check_region`.
    Raises NotReadyError with the reason, BadInputError for an invalid root or name.
    """
    check_pool_name(paths.pool)
    with closing_fd(open_own_folder(paths.root)) as root:
        try:
            folder = os.open(paths.pool, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
            with closing_fd(folder):
                fd = os.open("handoff.json", _FLAGS, dir_fd=folder)
        except OSError as error:
            raise _missing_error(paths, error) from error
    with closing_fd(fd):
        handoff = parse_handoff(read_limited(fd, MAX_BYTES))
    if handoff.pool != paths.pool:
        raise _bad(f"is for pool {handoff.pool!r}, not {paths.pool!r}", "OtherPool")
    if handoff.boot_id != (boot_id or this_boot()):
        raise _bad("is of another boot: what it promises is gone", "OtherBoot")
    return handoff


def _missing_error(paths: PoolPaths, error: OSError) -> Exception:
    if error.errno == errno.ENOENT:
        return NotReadyError(
            f"pool {paths.pool} is not prepared on this node (no {paths.handoff})",
            reason="NotPrepared",
            remedy="run `hostprep prepare` there, or wait longer",
        )
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return _bad("or its folder is a symbolic link or no folder", "BadPath")
    return from_os_error(error, f"open {paths.handoff}", permission_remedy=access_remedy(paths))


def access_remedy(paths: PoolPaths) -> str:
    """Return what lets a process attach that may not: whom the pool's folder belongs to says it."""
    try:
        gid = os.stat(paths.folder).st_gid
    except OSError:
        gid = 0
    if gid == 0:
        return (
            f"run it as root: pool {paths.pool} has no group; root gives it one by "
            "`hostprep prepare` with --gid (access.gid in its file)"
        )
    return f"run it as root, or as a member of the pool's group (gid {gid})"


def _bad(what: str, reason: str = "BadHandoff") -> NotReadyError:
    return NotReadyError(f"the handoff {what}", reason=reason, remedy=_REMEDY)


def parse_handoff(data: bytes) -> Handoff:
    """Return the handoff that the bytes hold. Raises NotReadyError for anything else."""
    if len(data) > MAX_BYTES:
        raise _bad(f"is larger than {MAX_BYTES} bytes")
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _bad(f"is not JSON ({type(error).__name__})") from error
    fields = _Fields(document, "the document")
    schema = fields.text("schema")
    if schema != SCHEMA:
        raise _bad(f"has schema {schema[:60]!r}; this version reads {SCHEMA}", "UnknownSchema")
    listed = fields.items("regions")
    if len(listed) > MAX_REGIONS:
        raise _bad(f"lists {len(listed)} regions; {MAX_REGIONS} is the most")
    regions = tuple(_parse_region(_Fields(entry, "a region")) for entry in listed)
    if len({region.name for region in regions}) < len(regions):
        raise _bad("names a region twice")
    if len({region.path for region in regions}) < len(regions):
        raise _bad("gives two regions the same path")
    return Handoff(
        pool=_pool_name(fields.text("pool")),
        pool_uid=fields.text("pool_uid"),
        generation=fields.integer("generation", least=0),
        boot_id=fields.text("boot_id"),
        agent_version=fields.text("agent_version"),
        regions=regions,
    )


def _pool_name(name: str) -> str:
    try:
        return check_pool_name(name)
    except BadInputError as error:
        raise _bad(f"is malformed: {error.message}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parse_region(fields: _Fields) -> Region:
    name = fields.text("name")
    if _NAME.fullmatch(name) is None:
        raise _bad(f"has a region with the impossible name {name[:40]!r}")
    path = fields.text("path")
    check_relative(path)
    placement = fields.text("placement")
    if _PLACEMENT.fullmatch(placement) is None:
        raise _bad(f"places region {name} at {placement[:40]!r}")
    backing = fields.text("backing")
    if backing not in {known.value for known in Backing}:
        raise _bad(f"gives region {name} the unknown backing {backing[:40]!r}")
    region = Region(
        name=name,
        path=path,
        st_dev=fields.integer("st_dev", least=0),
        st_ino=fields.integer("st_ino", least=1),
        size_bytes=fields.integer("size_bytes", least=1),
        backing=Backing(backing),
        page_bytes=fields.integer("page_bytes", least=1),
        placement=placement,
        pinned=fields.flag("pinned"),
        layout=fields.mapping("layout") if fields.get("layout") is not None else None,
        attach=_parse_advice(_Fields(fields.mapping("attach"), "attach")),
    )
    if region.page_bytes & (region.page_bytes - 1) or region.size_bytes % region.page_bytes:
        raise _bad(f"gives region {name} a size that is no whole number of pages")
    return region


def _parse_advice(fields: _Fields) -> AttachAdvice:
    return AttachAdvice(
        register_chunk_bytes=fields.integer("register_chunk_bytes", least=1),
        populate_read_threads=fields.integer("populate_read_threads", least=1, most=1024),
        skip_register=fields.flag("skip_register"),
    )


class _Fields:
    """A JSON object's members by type; unknown members are ignored (v1 grows by addition)."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _bad(f"is malformed: {where} is no object")
        self._values = value
        self._where = where

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str) or len(value) > 4096 or not value.isprintable():
            raise self._wrong(key, "a line of text")
        return value

    def integer(self, key: str, *, least: int, most: int = _MAX_INT) -> int:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, f"an integer from {least} to {most}")
        return value

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def items(self, key: str) -> list[Any]:
        value = self._values.get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self._values.get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return value

    def _wrong(self, key: str, wanted: str) -> NotReadyError:
        return _bad(f"is malformed: {key!r} of {self._where} is not {wanted}")


def open_region(paths: PoolPaths, region: Region, *, writable: bool) -> int:
    """Open a region's file by its checked path. Raises NotReadyError, BadInputError."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK
    with closing_fd(open_folder(paths.folder)) as folder:
        try:
            return open_beneath(folder, region.path, flags)
        except FileNotFoundError as error:
            raise _region_error(region, f"has no file at {region.path}", "RegionMissing") from error
        except PermissionError as error:
            raise _no_right(paths.region_of(region.path), region.path, folder) from error
        except OSError as error:
            raise from_os_error(error, f"open {paths.region_of(region.path)}") from error


def _no_right(path: str, relative: str, folder: int) -> BadInputError:
    """Name the group that the user lacks: the file's, or the folder's where it is not visible."""
    try:
        gid = os.stat(relative, dir_fd=folder, follow_symlinks=False).st_gid
    except OSError:
        gid = os.fstat(folder).st_gid
    return BadInputError(
        f"cannot open {path}: no permission",
        reason="NoPermission",
        remedy=f"run it as root, or as the pool's group {gid} (in Kubernetes supplementalGroups)",
    )


def check_region(region: Region, fd: int) -> None:
    """Check an open region file against the handoff: identity, size, every block resident.

    st_blocks counts resident pages on hugetlbfs and tmpfs; swapped-out ones too, which is why
    `Base` and `THP` are never published without noswap or on a node with swap.
    Raises NotReadyError with what is wrong.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise _region_error(region, "is not a regular file", "RegionSwapped")
    if (status.st_dev, status.st_ino) != (region.st_dev, region.st_ino):
        raise _region_error(region, "is another file than the one published", "RegionSwapped")
    if status.st_size != region.size_bytes:
        raise _region_error(
            region, f"has {status.st_size} bytes, not {region.size_bytes}", "RegionResized"
        )
    resident = status.st_blocks * 512
    if resident < region.size_bytes:
        missing = region.size_bytes - resident
        raise _region_error(region, f"lacks {missing} bytes of its memory", "RegionNotResident")


def verify_handoff(
    paths: PoolPaths, handoff: Handoff, *, pages: bool = False
) -> Iterator[tuple[Region, HostprepError | None]]:
    """Yield every region with what is wrong with it, or None; one bad region stops no other.

    With `pages` every page is touched, so that one which the hardware reported bad is named.
    """
    for region in handoff.regions:
        try:
            with closing_fd(open_region(paths, region, writable=False)) as fd:
                check_region(region, fd)
                if pages:
                    walk_region(region, fd)
        except HostprepError as error:
            yield region, error
        else:
            yield region, None


def walk_region(region: Region, fd: int) -> None:
    """Touch all pages of an open region. Raises NotReadyError naming the first bad ones."""
    from hostprep.linux.memory import address_of, map_shared

    bad: list[int] = []
    for start in range(0, region.size_bytes, _WINDOW_BYTES):
        size = min(_WINDOW_BYTES, region.size_bytes - start)
        try:
            with map_shared(fd, size, writable=False, offset_bytes=start) as mapping:
                found = bad_pages(address_of(mapping), size, region.page_bytes)
                bad.extend(start + offset for offset in found)
        except FailedError:
            check_region(region, fd)  # cut short meanwhile: that is the reason to give
            raise
    if bad:
        shown = ", ".join(f"{offset:#x}" for offset in bad[:8])
        raise _region_error(
            region,
            f"has {len(bad)} bad page(s) of {region.page_bytes} bytes, at offset {shown}",
            "PoisonedPage",
        )


def bad_pages(address: int, size_bytes: int, page_bytes: int) -> Iterator[int]:
    """Yield the offsets of pages in a mapping that cannot be read, by halving what fails.

    MADV_POPULATE_READ reports them as EHWPOISON where a plain read would end the process
    with SIGBUS. Raises NotReadyError or FailedError when populating fails for all pages alike.
    """
    from hostprep.linux.memory import EHWPOISON, explain, populate

    step = max(_WALK_BYTES, page_bytes)
    ranges = [(start, min(step, size_bytes - start)) for start in range(0, size_bytes, step)]
    while ranges:
        offset, length = ranges.pop(0)
        try:
            populate(address + offset, length, write=False)
        except OSError as error:
            if error.errno != EHWPOISON:
                raise explain(error.errno, f"reading pages at {offset:#x}") from error
            if length <= page_bytes:
                yield offset
                continue
            half = length // 2 // page_bytes * page_bytes or page_bytes
            ranges[:0] = [(offset, half), (offset + half, length - half)]


def _region_error(region: Region, what: str, reason: str) -> NotReadyError:
    return NotReadyError(
        f"region {region.name} {what}",
        reason=reason,
        remedy="run `hostprep prepare` again: it rebuilds this region alone",
    )
