"""What `hostprep size` prints of a model: tables for people, documents for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hostprep.cli.size_engine import engine_document, show_engine
from hostprep.cli.size_gpu import weights_line
from hostprep.cli.size_one import Sized
from hostprep.console import print_table, say, wrapped
from hostprep.sizing.examples import EXAMPLES
from hostprep.sizing.families import KINDS
from hostprep.sizing.gpus import GPUS, GpuBudget, Gpus
from hostprep.sizing.groups import GroupSlots, Tier
from hostprep.sizing.size import Sizing
from hostprep.units import format_bytes

_COLUMNS = (
    "GROUP",
    "WINDOW",
    "LAYERS",
    "SLOT BYTES",
    "MIN SLOTS",
    "SLOTS",
    "BYTES",
    "SHARE",
    "REQUESTS",
)


def show_all(sized: Sequence[Sized], gpus: Gpus | None = None) -> None:
    """Print every model's tables, and what the node needs for all of them."""
    for index, one in enumerate(sized):
        if index:
            say("")
        _show(one)
    lines = node_lines(sized, gpus)
    if lines:
        say("")
    for line in lines:
        say(wrapped(line, begin="", then="  "))


def node_lines(sized: Sequence[Sized], gpus: Gpus | None = None) -> list[str]:
    """Say what host memory all ranks of all models take together; nothing for a single rank.

    Nor where no engine's host tier is above. `gpus`: those of --gpu, which may be too few.
    """
    ranks = sum(one.limits.ranks for one in sized)
    if ranks <= 1:
        return []
    lines = []
    holding = [one for one in sized if one.host_bytes]
    if holding:
        each = ", ".join(
            f"{one.sizing.model.name} {format_bytes(one.host_bytes)}"
            + (f" for {one.limits.ranks} ranks" if one.limits.ranks > 1 else "")
            for one in holding
        )
        total = format_bytes(sum(one.host_bytes for one in holding))
        ways = dict.fromkeys(one.way for one in holding if one.engine and len(one.engine.host) > 1)
        by = f", by {', '.join(ways)}" if ways else ""
        lines.append(f"Host memory of all that is above{by}: {total} ({each})")
    if len(sized) > 1 and gpus is not None and gpus.count is not None and ranks > gpus.count:
        lines.append(
            f"They need {ranks} GPUs at once, and {gpus.count} are given: they cannot all run at "
            "the same time"
        )
    return lines


def _show(one: Sized) -> None:
    sizing, limits = one.sizing, one.limits
    head = (
        f"{sizing.model.name} ({sizing.model.family}): {_requests(limits.max_batch_size)} of up to "
        f"{limits.max_seq_len} tokens, {limits.tokens_per_block} a block, each rank of "
        f"TP {limits.tensor_parallel} x PP {limits.pipeline_parallel}"
    )
    say(wrapped(head, begin="", then="  "))
    if one.budget is not None:
        say(wrapped(_budget_line(one.budget), begin="", then="  "))
        say(wrapped(weights_line(one.budget.weights), begin="  ", then="    "))
    for note in one.notes:
        say(wrapped(note, begin="  note: ", then="    "))
    if one.engine is not None:
        show_engine(one.engine)
        return
    say(wrapped(_least(sizing), begin="", then="  "))
    host = "Host, the least of it" if sizing.host.groups == sizing.floor.groups else "Host"
    for name, tier in (("GPU", sizing.gpu), (host, sizing.host)):
        if tier is None:
            continue
        say(f"{name}:")
        rows = [_row(group, tier) for group in tier.groups]
        if tier.has_directory:
            rows.append(_directory_row(tier))
        print_table("", _COLUMNS, rows)
        first = tier.limiting
        say(
            f"  {format_bytes(tier.size_bytes)}; first to fill: {first.group.name}, with "
            f"{_requests(first.requests)} of {limits.typical} tokens"
        )


def _least(sizing: Sizing) -> str:
    """Say what happens with less than each of the two sizes; more is no promise of speed."""
    batch = sizing.limits.max_batch_size
    alone, together = _distinct_sizes(sizing.smallest.size_bytes, sizing.floor.size_bytes)
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


def _distinct_sizes(smaller: int, larger: int) -> tuple[str, str]:
    """Return both sizes as text; in whole MiB, rounded up, where they would read the same."""
    texts = format_bytes(smaller), format_bytes(larger)
    if smaller == larger or len({text.replace(".0 ", " ") for text in texts}) == 2:
        return texts
    return f"{-(-smaller >> 20)} MiB", f"{-(-larger >> 20)} MiB"


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


def _directory_row(tier: Tier) -> tuple[str, ...]:
    """Say what the records of all slots take; no request waits for it."""
    size = format_bytes(tier.directory_bytes)
    return ("directory", "-", "-", "-", "-", str(tier.slots), size, "-", "-")


def _budget_line(budget: GpuBudget) -> str:
    return (
        f"For caches on each GPU ({budget.gpus}): {budget.reckoning} = "
        f"{format_bytes(budget.caches_bytes)}"
    )


def document_of(one: Sized) -> dict[str, Any]:
    """Return one model's sizing for programs."""
    sizing = one.sizing
    head = {
        "model": sizing.model.name,
        "model_type": sizing.model.family,
        "limits": one.limits,
        "notes": one.notes,
        "gpu_budget": one.budget and _budget_document(one.budget),
    }
    if one.engine is not None:
        return head | {"engine": engine_document(one.engine)}
    return head | {
        "smallest_bytes": sizing.smallest.size_bytes,
        "floor_bytes": sizing.floor.size_bytes,
        "gpu": sizing.gpu and _tier_document(sizing.gpu),
        "host": _tier_document(sizing.host),
        "layout": sizing.layout.to_json(),
    }


def _tier_document(tier: Tier) -> dict[str, Any]:
    return {
        "size_bytes": tier.size_bytes,
        "directory_bytes": tier.directory_bytes,
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


def _budget_document(budget: GpuBudget) -> dict[str, Any]:
    weights = budget.weights
    return {
        "gpu": budget.gpus.gpu.product,
        "gpus": budget.gpus.count,
        "memory_bytes": budget.gpus.gpu.memory_bytes,
        "utilization": budget.utilization,
        "reserve_bytes": budget.reserve_bytes,
        "weights": {
            "total_bytes": weights.total_bytes,
            "rank_bytes": weights.rank_bytes,
            "least_bytes": weights.least_bytes,
            "most_bytes": weights.most_bytes,
            "source": weights.source,
        },
        "caches_bytes": budget.caches_bytes,
    }


def node_document(sized: Sequence[Sized]) -> dict[str, Any]:
    """Return what all ranks of all models take together, for programs."""
    return {
        "ranks": sum(one.limits.ranks for one in sized),
        "host_bytes": sum(one.host_bytes for one in sized),
    }


def show_families() -> None:
    """Print the kinds of models that are known, each with a published one."""
    rows = [(kind, EXAMPLES.get(kind, "-")) for kind in KINDS]
    print_table("", ("MODEL_TYPE", "FOR EXAMPLE"), rows)


def show_gpus() -> None:
    """Print the GPUs that --gpu knows."""
    say("")
    rows = [(gpu.name, gpu.product, format_bytes(gpu.memory_bytes)) for gpu in GPUS]
    print_table("", ("GPU", "PRODUCT", "MEMORY"), rows)
