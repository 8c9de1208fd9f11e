"""What `hostprep size --engine` prints: an engine's own groups, blocks and log lines."""

from __future__ import annotations

from typing import Any

from hostprep.console import print_table, say, wrapped
from hostprep.sizing.engines.rules import EngineGroup, EngineSizing
from hostprep.units import format_bytes

_GROUPS = ("GROUP", "WINDOW", "LAYERS", "PADDED", "BLOCK TOKENS", "PAGE BYTES", "BLOCKS A REQUEST")
_HOST = ("HOST TIER", "BYTES", "BLOCK BYTES", "BLOCKS", "BLOCKS A REQUEST", "REQUESTS")


def show_engine(sizing: EngineSizing) -> None:
    """Print what the engine makes of the model."""
    say(
        f"{sizing.engine} {sizing.version} serves a request of {sizing.limits.max_seq_len} tokens "
        f"with no less than {format_bytes(sizing.least_bytes)} for caches on each GPU"
    )
    print_table("", _GROUPS, [_row(group) for group in sizing.groups])
    if sizing.gpu is not None:
        tier = sizing.gpu
        size = f" of {format_bytes(tier.block_bytes)}" if tier.block_bytes else ""
        say(
            f"GPU: {tier.blocks} blocks{size}, {tier.tokens} tokens, "
            f"{tier.concurrency:.2f} requests of {sizing.limits.max_seq_len} at once; it will log:"
        )
        for line in tier.log_lines:
            say(wrapped(line, begin="  ", then="    "))
    if sizing.host:
        rows = [
            (
                host.way,
                format_bytes(host.size_bytes),
                str(host.block_bytes),
                str(host.blocks),
                str(host.blocks_per_request),
                str(host.requests),
            )
            for host in sizing.host
        ]
        print_table("", _HOST, rows)
        small = ", ".join(host.way for host in sizing.host if not host.requests)
        if small:
            typical = sizing.limits.typical
            text = (
                f"of a request of {typical} tokens {small} keeps a part: the rest is computed again"
            )
            say(wrapped(text, begin="  note: ", then="    "))
        for note in dict.fromkeys(note for host in sizing.host for note in host.notes):
            say(wrapped(note, begin="  note: ", then="    "))


def _row(group: EngineGroup) -> tuple[str, ...]:
    return (
        group.name,
        str(group.window or "none"),
        str(group.layers),
        str(group.padded_layers),
        str(group.tokens_per_block or "state"),
        str(group.page_bytes),
        str(group.blocks_per_request),
    )


def engine_document(sizing: EngineSizing) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "name": sizing.engine,
        "version": sizing.version,
        "block_bytes": sizing.block_bytes,
        "least_bytes": sizing.least_bytes,
        "groups": sizing.groups,
        "gpu": sizing.gpu,
        "host": sizing.host,
    }
