"""What `hostprep size` prints: tables, JSON, and the pool that `hostprep prepare` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from hostprep.api.names import API_VERSION, POOL_KIND
from hostprep.api.pool_resource import load_pools
from hostprep.layout import RECURRENT
from hostprep.sizing.groups import GroupSlots, Tier
from hostprep.sizing.size import Sizing
from hostprep.units import format_bytes

__all__ = ["Table", "pool_yaml", "sizing_document", "tables"]

_GROUP = ("GROUP", "WINDOW", "LAYERS", "BYTES/SLOT", "MIN SLOTS")
_OPTIONS = {"spec.backings": "--backing", "spec.regions": "--regions"}
"""Fields of a pool that are written as given, and so may be refused."""
_TIER = ("SLOTS", "BYTES", "SHARE", "REQUESTS")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for people, and lines around them."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def tables(sizing: Sizing) -> list[Table]:
    """Return what people see of one model."""
    limits = sizing.limits
    ranks = f"TP {limits.tensor_parallel} x PP {limits.pipeline_parallel}"
    head = (
        f"{sizing.model.name} ({sizing.model.family}): {_requests(limits.max_batch_size)} of up to "
        f"{limits.max_seq_len} tokens, {limits.tokens_per_block} a block, each rank of {ranks}"
    )
    host = "Host, the least of it" if sizing.host == sizing.floor else "Host"
    shown = [("GPU", sizing.gpu), (host, sizing.host)]
    found = [_tier_table(name, tier, sizing) for name, tier in shown if tier is not None]
    found[0].before[:0] = [head, *(f"  note: {note}" for note in sizing.notes), _least(sizing)]
    return found


def _least(sizing: Sizing) -> str:
    """Say what happens with less than each of the two sizes; more is no promise of speed."""
    batch = sizing.limits.max_batch_size
    alone, together = _told_apart(sizing.smallest.size_bytes, sizing.floor.size_bytes)
    longest = f"one request of {sizing.limits.max_seq_len} tokens may never end"
    if batch == 1:
        return f"Below {alone} {longest}"
    if alone == together:
        return (
            f"Below {alone} {longest}; from there on {batch} at once come to no standstill, though "
            "they may wait for one another"
        )
    return f"Below {alone} {longest}; below {together} {batch} at once can come to a standstill"


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _told_apart(smaller: int, larger: int) -> tuple[str, str]:
    """Return both sizes for people; in whole MiB, rounded up, where they would look the same."""
    told = format_bytes(smaller), format_bytes(larger)
    if smaller == larger or len({text.replace(".0 ", " ") for text in told}) == 2:
        return told
    return f"{-(-smaller >> 20)} MiB", f"{-(-larger >> 20)} MiB"


def _tier_table(name: str, tier: Tier, sizing: Sizing) -> Table:
    rows = [_row(group, tier) for group in tier.groups]
    first = tier.limiting
    after = (
        f"  {format_bytes(tier.size_bytes)}; first to fill: {first.group.name}, with "
        f"{_requests(first.requests)} of "
        f"{sizing.limits.typical} tokens"
    )
    return Table((*_GROUP, *_TIER), rows, [f"{name}:"], [after])


def _row(group: GroupSlots, tier: Tier) -> tuple[str, ...]:
    window = "state" if group.group.per_sequence else str(group.group.window or "none")
    return (
        group.group.name,
        window,
        str(group.group.layers),
        str(group.group.slot_bytes),
        str(group.min_slots),
        str(group.slots),
        format_bytes(group.size_bytes),
        f"{100 * tier.share(group):.1f} %",
        str(group.requests),
    )


def sizing_document(sizing: Sizing) -> dict[str, Any]:
    """Return one model's sizing for programs."""
    return {
        "model": sizing.model.name,
        "model_type": sizing.model.family,
        "limits": sizing.limits,
        "notes": sizing.notes,
        "smallest_bytes": sizing.smallest.size_bytes,
        "floor_bytes": sizing.floor.size_bytes,
        "gpu": sizing.gpu and _tier_document(sizing.gpu),
        "host": _tier_document(sizing.host),
        "layout": sizing.layout.to_json(),
    }


def _tier_document(tier: Tier) -> dict[str, Any]:
    return {
        "size_bytes": tier.size_bytes,
        "limiting_group": tier.limiting.group.name,
        "requests": tier.limiting.requests,
        "groups": [
            {
                "name": one.group.name,
                "window_tokens": one.group.window,
                "per_sequence": one.group.per_sequence,
                "layers": one.group.layers,
                "slot_bytes": one.group.slot_bytes,
                "min_slots": one.min_slots,
                "slots": one.slots,
                "size_bytes": one.size_bytes,
                "share": round(tier.share(one), 6),
                "slots_per_request": one.per_request,
                "requests": one.requests,
            }
            for one in tier.groups
        ],
    }


def pool_yaml(name: str, sizing: Sizing, options: dict[str, str | None]) -> str:
    """Return a HostMemoryPool with that sizing, which `hostprep prepare -f` takes.

    Raises BadInputError where the options make none, with the field named.
    """
    regions = options["regions"] or _ranks(sizing)
    spec: dict[str, Any] = {"regions": int(regions) if str(regions).isdigit() else regions}
    if options["backing"]:
        spec["backings"] = [part.strip() for part in options["backing"].split(",")]
    spec["sizing"] = _sizing_spec(sizing)
    document = {
        "apiVersion": API_VERSION,
        "kind": POOL_KIND,
        "metadata": {"name": name},
        "spec": spec,
    }
    text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=False)
    load_pools(text, source="", options=_OPTIONS)
    return text


def _ranks(sizing: Sizing) -> int:
    return sizing.limits.tensor_parallel * sizing.limits.pipeline_parallel


def _sizing_spec(sizing: Sizing) -> dict[str, Any]:
    layout = sizing.layout
    groups = []
    for group, least in zip(layout.layout.groups, layout.min_slots, strict=True):
        shown: dict[str, Any] = {"name": group.name}
        if group.kind == RECURRENT:
            shown["kind"] = "Recurrent"
        if group.window_tokens is not None:
            shown["windowTokens"] = group.window_tokens
        shown |= {"slotBytes": group.slot_bytes, "minSlots": least, "slots": group.slots}
        groups.append(shown)
    return {
        "model": layout.model,
        "tokensPerBlock": layout.layout.tokens_per_block,
        "groups": groups,
    }
