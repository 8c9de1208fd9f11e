"""What vLLM's host tiers hold: bytes to blocks, blocks to bytes, blocks of one request.

Read from vLLM 0.32.0: distributed/kv_transfer/kv_connector/v1/offloading/{config,scheduler}.py,
v1/kv_offload/cpu/spec.py, v1/simple_kv_offload/, v1/core/single_type_kv_cache_manager.py.

A host block holds what a block of the GPU's pool holds, in all ranks: it is as large as the
largest group's layers, whichever group it is of. Only whole blocks are stored.

Layers with a window are not stored as if they were full. What is stored of a group with a window
are the blocks that a later request with the same prompt needs: the window before the prompt's end
(prefix_cache_retention_interval, 0 by default); of a group of states the one at that place. Where
vLLM cannot tell which blocks those are, because groups that keep all tokens have blocks of
different sizes, or blocks that are no multiple of the window's, it stores all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hostprep.backing import MIB
from hostprep.engines.vllm.launch import SIMPLE, usable_bytes
from hostprep.engines.vllm.offloading_layout import layout_of, row_bytes_of
from hostprep.errors import BadInputError
from hostprep.layout import directory_bytes
from hostprep.sizing.engines.rules import EngineGroup, EngineHost
from hostprep.sizing.groups import Limits
from hostprep.sizing.size import Memory

TIERING = "vllm"
OFFLOADING = "vllm-offloading"
BY_TENSOR = "vllm-simple"
WAYS = (TIERING, OFFLOADING, BY_TENSOR)
"""As `hostprep exec --engine` has them."""

_ALIGN_BYTES = 4096
"""Of a block of all ranks, in vLLM's own region (SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT)."""
PAGE_BYTES = 2 * MIB
"""Of a region's pages where no backing is known: those of HugeTLB2Mi."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPool:
    """One region that all ranks of one engine use together: bytes <-> blocks."""

    way: str
    block_bytes: int
    """Of one GPU block, on one rank."""
    ranks: int
    is_replicated: bool = False
    """Whether all ranks keep the same (latents), so that one copy is enough for them."""
    page_bytes: int = PAGE_BYTES
    has_directory: bool = False
    """Whether blocks outlive the engine (`--warm`): the region's end then says which are which."""

    def __post_init__(self) -> None:
        if self.way not in WAYS:
            raise BadInputError(f"{self.way!r} is no way to vLLM: {', '.join(WAYS)}")

    @property
    def copies(self) -> int:
        """Ranks that keep parts of their own."""
        return 1 if self.is_replicated and self.way != BY_TENSOR else self.ranks

    @property
    def row_bytes(self) -> int:
        """Bytes that one block takes in the whole region."""
        if self.way == TIERING:
            whole = self.block_bytes * self.copies
            return -(-whole // _ALIGN_BYTES) * _ALIGN_BYTES
        if self.way == OFFLOADING:
            return row_bytes_of(self.block_bytes) * self.copies
        return self.block_bytes * self.copies

    def blocks(self, region_bytes: int) -> int:
        """Return the blocks that vLLM makes of a region; 0 where it is too small for any."""
        if self.way == TIERING:
            return region_bytes // self.row_bytes
        if self.way == BY_TENSOR:
            usable = usable_bytes(
                SIMPLE, region_bytes, page_bytes=self.page_bytes, workers=self.ranks
            )
            return usable // self.ranks // self.block_bytes
        blocks = self._rows(region_bytes)
        if blocks and self.has_directory:  # it has as many records as there would be blocks
            blocks = self._rows(region_bytes - directory_bytes(blocks))
        return blocks

    def region_bytes(self, blocks: int) -> int:
        """Return the smallest region, in whole pages, of which vLLM makes so many blocks."""
        page = self.page_bytes
        low = max(1, blocks * self.row_bytes // page)
        high = low + self.copies + 1
        while self.blocks(high * page) < blocks:
            high += max(1, (high - low))
        while low < high:
            middle = (low + high) // 2
            enough = self.blocks(middle * page) >= blocks
            low, high = (low, middle) if enough else (middle + 1, high)
        return low * page

    def _rows(self, usable: int) -> int:
        try:
            return layout_of(
                usable,
                page_bytes=self.page_bytes,
                chunk_bytes=self.block_bytes,
                slices=self.copies,
            ).rows
        except BadInputError:
            return 0


def host_tiers(
    groups: Sequence[EngineGroup],
    *,
    block_bytes: Sequence[int],
    is_replicated: bool,
    limits: Limits,
    memory: Memory,
) -> tuple[EngineHost, ...]:
    """Return what each way of attaching makes of the host memory that is given.

    `block_bytes`: of each pipeline stage. Where stages differ nothing is returned: vLLM reckons a
    host block by the rank that asks, and ranks would not agree on where one lies.
    """
    if len(set(block_bytes)) > 1:
        return ()
    ranks = limits.tensor_parallel * limits.pipeline_parallel
    found = []
    a_request, notes = blocks_of_request(groups, limits.typical)
    for way in WAYS:
        pool = HostPool(
            way=way, block_bytes=block_bytes[0], ranks=ranks, is_replicated=is_replicated
        )
        if memory.host_bytes is not None:
            size_bytes = memory.host_bytes * ranks
        elif memory.host_tokens is not None:
            requests = -(-memory.host_tokens // limits.typical)
            size_bytes = pool.region_bytes(requests * a_request)
        else:
            size_bytes = pool.region_bytes(a_request)
        found.append(
            EngineHost(
                way=way,
                blocks=pool.blocks(size_bytes),
                block_bytes=pool.row_bytes,
                copies=pool.copies,
                size_bytes=size_bytes,
                blocks_per_request=a_request,
                notes=notes,
            )
        )
    return tuple(found)


def blocks_of_request(groups: Sequence[EngineGroup], tokens: int) -> tuple[int, tuple[str, ...]]:
    """Return the host blocks that a prompt of so many tokens leaves, and what to say of windows."""
    whole = {g.tokens_per_block for g in groups if g.tokens_per_block and g.window is None}
    sizes = whole or {max(group.tokens_per_block for group in groups)}
    aligned_to = sizes.pop() if len(sizes) == 1 else None
    blocks, notes = 0, []
    for group in groups:
        block = group.tokens_per_block
        if not block:
            blocks += 1
        elif group.window is None:
            blocks += tokens // block
        elif group.is_chunked or aligned_to is None or aligned_to % block:
            notes.append(f"of {group.name} the host tier keeps all tokens, as if it were full")
            blocks += tokens // block
        else:
            notes.append(
                f"of {group.name} the host tier keeps the window before a prompt's end, not all "
                "tokens"
            )
            end = (tokens - 1) // aligned_to * aligned_to // block
            blocks += min(end, -(-(group.window - 1) // block))
    return max(1, blocks), tuple(dict.fromkeys(notes))
