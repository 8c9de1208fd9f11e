"""Reading a handoff that may be torn, huge, nested, forged or of another boot.

Checked by hand rather than by a schema library: engines' containers have none.
"""

from __future__ import annotations

import errno
import json
import os
import re

from hostprep.backing import Backing
from hostprep.client.handoff import SCHEMA, AttachAdvice, Handoff, Region
from hostprep.errors import BadInputError, NotReadyError
from hostprep.linux.files import check_relative, closing_fd, from_os_error, open_folder
from hostprep.linux.files import read_limited as _read_limited
from hostprep.linux.processes import boot_id as this_boot
from hostprep.paths import PoolPaths, check_pool_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["MAX_BYTES", "MAX_REGIONS", "parse_handoff", "read_handoff"]

MAX_BYTES = 4 << 20
"""A region takes about 500 bytes: room for far more than MAX_REGIONS of them."""
MAX_REGIONS = 4096

_MAX_INT = (1 << 63) - 1
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,126}[a-z0-9])?", re.ASCII)
_PLACEMENT = re.compile(r"interleave|node:(?:0|[1-9][0-9]{0,4})", re.ASCII)
_REMEDY = "run `hostprep prepare` again"


def read_handoff(paths: PoolPaths, *, boot_id: str | None = None) -> Handoff:
    """Read and check the pool's handoff, and that it is of this boot and for this pool.

    What the regions' files are is not looked at here: see `check_region`.
    Raises NotReadyError with the reason, BadInputError for a root or name that cannot be.
    """
    check_pool_name(paths.pool)
    with closing_fd(open_folder(paths.root)) as root:
        try:
            folder = os.open(paths.pool, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=root)
            with closing_fd(folder):
                fd = os.open("handoff.json", _FLAGS, dir_fd=folder)
        except OSError as error:
            raise _not_there(paths, error) from error
    with closing_fd(fd):
        handoff = parse_handoff(_read_limited(fd, MAX_BYTES))
    if handoff.pool != paths.pool:
        raise _bad(f"is for pool {handoff.pool!r}, not {paths.pool!r}", "OtherPool")
    if handoff.boot_id != (boot_id or this_boot()):
        raise _bad("is of another boot: what it promises is gone", "OtherBoot")
    return handoff


# O_NONBLOCK: a FIFO put in the file's place must not make the reader wait for ever.
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def _not_there(paths: PoolPaths, error: OSError) -> Exception:
    if error.errno == errno.ENOENT:
        return NotReadyError(
            f"pool {paths.pool} is not prepared on this node (no {paths.handoff})",
            reason="NotPrepared",
            remedy="run `hostprep prepare` there, or wait longer",
        )
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return _bad("or its folder is a symbolic link or no folder", "BadPath")
    return from_os_error(error, f"open {paths.handoff}")


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
    """A JSON object's members by type; unknown members are let pass (v1 grows by addition)."""

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
