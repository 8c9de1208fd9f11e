"""What is kept in a region for its owner: whose, since when, and what the engine reports of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hostprep.client.sidecar import Sidecar, read_sidecar, write_sidecar
from hostprep.client.untrusted import is_text, printable, read_object
from hostprep.errors import NotReadableError
from hostprep.linux.files import atomic_write, remove_file
from hostprep.paths import PoolPaths

_MAX_COUNT = 1 << 53
_MAX_BYTES = 1 << 50
_LAST_S = 2.0**40
"""A time that no clock shows any more."""
_MAX_FIELDS = 64
_MAX_FIELD = 80
_MAX_VALUE = 200


@dataclass(frozen=True)
class WarmReport:
    """The engine's own account. Any engine of the pool may have written it: bounded, printable."""

    at_s: float = 0.0
    """When the engine decided what to do with what was kept, by the clock."""
    recovered_blocks: int = 0
    recovered_bytes: int = 0
    kept_blocks: int = 0
    """Recorded now: what a process that starts after a kill would find."""
    loaded_blocks: int = 0
    """Loads of recovered blocks so far: of tokens that were computed by an earlier process."""
    refused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """What differed, by field of the identity: what was kept, and what the engine has now."""


@dataclass(frozen=True)
class KeptContents:
    """The contents of a region whose owner may come back for them."""

    name: str
    """Empty where the owner gave none."""
    since_s: float
    """When the owner first claimed the region, by the clock; 0 where it is not known."""
    report: WarmReport | None = None
    """None where no engine reported, or the report cannot be read."""


def kept_contents(paths: PoolPaths, region: str) -> KeptContents | None:
    """Return what a region that is not clean keeps; None where it has no owner."""
    sidecar = read_sidecar(paths, region)
    if sidecar is None or sidecar.owner is None:
        return None
    return KeptContents(sidecar.owner.name, sidecar.kept_since_s, read_warm_report(paths, region))


def read_warm_report(paths: PoolPaths, region: str) -> WarmReport | None:
    """Return the engine's report; None where there is none that can be read."""
    if not os.path.lexists(paths.warm_report(region)):
        return None
    try:
        fields = read_object(paths.warm_report(region))
        return WarmReport(
            at_s=fields.number("at_s", most=_LAST_S),
            recovered_blocks=fields.integer("recovered_blocks", most=_MAX_COUNT),
            recovered_bytes=fields.integer("recovered_bytes", most=_MAX_BYTES),
            kept_blocks=fields.integer("kept_blocks", most=_MAX_COUNT),
            loaded_blocks=fields.integer("loaded_blocks", most=_MAX_COUNT),
            refused=_refused(fields.get("refused")),
        )
    except NotReadableError:
        return None


def write_warm_report(paths: PoolPaths, region: str, name: str, report: WarmReport) -> None:
    """Write the engine's account, for `hostprep status` and the agent. Raises HostprepError."""
    shown = list(report.refused.items())[:_MAX_FIELDS]
    document = {
        "name": name,
        "at_s": report.at_s,
        "recovered_blocks": report.recovered_blocks,
        "recovered_bytes": report.recovered_bytes,
        "kept_blocks": report.kept_blocks,
        "loaded_blocks": report.loaded_blocks,
        "refused": {key[:_MAX_FIELD]: [text[:_MAX_VALUE] for text in both] for key, both in shown},
    }
    atomic_write(paths.warm_report(region), json.dumps(document).encode(), mode=0o660)


def _refused(value: object) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for key, values in value.items() if isinstance(value, dict) else ():
        if len(found) == _MAX_FIELDS:
            break
        if not is_text(key, most=_MAX_FIELD) or not key.isascii():
            continue  # no field's name; and as JSON it may be twelve times as long
        if isinstance(values, list) and len(values) == 2:
            was, now = (printable(str(each)[:_MAX_VALUE]) for each in values)
            found[printable(key)] = was, now
    return found


def forget_contents(paths: PoolPaths, region: str, sidecar: Sidecar, *, gid: int) -> None:
    """Record that nobody may come back for a region's bytes: it is dirty, and to be scrubbed.

    The caller holds the claim lock, and saw that no process leases the region. Its last holder
    stays on record: a scrub waits for that process's end.
    """
    write_sidecar(paths, region, replace(sidecar, owner=None), gid=gid)
    remove_file(paths.warm_report(region))
