"""From a model's layers to groups of slots, and memory divided among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hostprep.api.slot_layout import GROUP_ALIGN_BYTES, SLOT_ALIGN_BYTES, round_up
from hostprep.errors import BadInputError
from hostprep.layout import MAX_SLOTS, directory_bytes
from hostprep.sizing.model import Layers, Model, Store
from hostprep.units import format_bytes

LONGEST_TOKENS = 1 << 31

MOST_TOKENS_PER_BLOCK = 1 << 20

TOKENS_PER_BLOCK = 32
"""The default."""

_MOST = {
    "max_batch_size": 1 << 20,
    "max_seq_len": LONGEST_TOKENS,
    "max_num_tokens": LONGEST_TOKENS,
    "tokens_per_block": MOST_TOKENS_PER_BLOCK,
    "beam_width": 1 << 10,
    "tensor_parallel": 1 << 14,
    "pipeline_parallel": 1 << 14,
    "typical_seq_len": LONGEST_TOKENS,
    "speculative_tokens": 1 << 16,
}
_OPTIONS = {"tensor_parallel": "--tp", "pipeline_parallel": "--pp"}

_STEPS = 256
"""Fractions of a request that are divided: finer than any group's slots matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Serving limits, in the words of TensorRT-LLM.

    vLLM's are max_num_seqs, max_model_len, max_num_batched_tokens and block_size.
    Raises BadInputError, naming the command line's option, for a number that makes no sense.
    """

    max_batch_size: int
    """Requests that are served at once."""
    max_seq_len: int
    """Tokens of the longest request, its answer included."""
    max_num_tokens: int = 8192
    """Tokens of one step, over all requests: how long a chunk of a prompt can be."""
    tokens_per_block: int = TOKENS_PER_BLOCK
    beam_width: int = 1
    speculative_tokens: int = 0
    """Tokens that are drafted beyond each step's own."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    typical_seq_len: int | None = None
    """Tokens of a usual request: what leftover memory is divided by. None: `max_seq_len`."""

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            least = 0 if name == "speculative_tokens" else 1
            value = getattr(self, name)
            if value is None and name == "typical_seq_len":
                continue
            if type(value) is not int or not least <= value <= most:
                option = _OPTIONS.get(name) or "--" + name.replace("_", "-")
                raise BadInputError(f"{option}: is {value}", remedy=f"give {least} to {most}")
        if self.typical > self.max_seq_len:
            raise BadInputError(
                f"--typical-seq-len: is {self.typical}, more than --max-seq-len, "
                f"{self.max_seq_len}",
                remedy="give at most that",
            )

    @property
    def typical(self) -> int:
        """Tokens of a usual request."""
        return self.max_seq_len if self.typical_seq_len is None else self.typical_seq_len

    @property
    def ranks(self) -> int:
        """Ranks of one engine, each with a GPU of its own."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def sequences(self) -> int:
        """Sequences at once: every beam of every request."""
        return self.max_batch_size * self.beam_width

    @property
    def states(self) -> int:
        """States of one sequence: after each drafted token too, for any of them may be the last.

        Source: vLLM 0.32, single_type_kv_cache_manager.py, MambaManager: 1 + drafts blocks.
        """
        return 1 + self.speculative_tokens

    def for_batch(self, max_batch_size: int) -> Limits:
        """Return them for another number of requests at once."""
        return replace(self, max_batch_size=max_batch_size)

    def for_length(self, max_seq_len: int) -> Limits:
        """Return them for another longest request."""
        typical = self.typical_seq_len and min(self.typical_seq_len, max_seq_len)
        return replace(self, max_seq_len=max_seq_len, typical_seq_len=typical)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that keep the same tokens, and so share slots."""

    name: str
    slot_bytes: int
    """Of one block of tokens (of one state, where it is per sequence), on the fullest rank."""
    layers: int = 1
    """Of the whole model."""
    window: int | None = None
    ratio: int = 1
    per_sequence: bool = False


def groups_of(model: Model, limits: Limits) -> tuple[CacheGroup, ...]:
    """Return the groups of a model, those that keep all tokens first.

    Pipeline stages hold adjacent layers, the first ones one more where it does not come out even
    (torch.tensor_split, which TensorRT-LLM uses); layers that draft tokens are on the last stage.
    Each group's slot is that of the stage that holds most of it: one layout then serves every rank.
    A window that is no shorter than the longest request never closes: all its tokens stay.
    Raises BadInputError naming the option where ranks and heads, or blocks and compression, do
    not go together.
    """
    stages = stages_of(model, limits)
    stages[-1] += model.draft_layers
    found: dict[_Key, CacheGroup] = {}
    for stage in stages:
        here: dict[_Key, int] = {}
        for layer in stage:
            for store in layer:
                key = _key(store, limits)
                here[key] = here.get(key, 0) + _store_bytes(store, limits)
                found.setdefault(key, _empty_group(store, *key))
            for key in {_key(store, limits) for store in layer}:
                found[key] = replace(found[key], layers=found[key].layers + 1)
        for key, size_bytes in here.items():
            largest = max(found[key].slot_bytes, size_bytes)
            found[key] = replace(found[key], slot_bytes=largest)
    if not found:
        raise BadInputError(f"{model.name}: no layer has a cache", remedy="give another model")
    return tuple(found[key] for key in sorted(found, key=_order))


_Key = tuple[int | None, int, bool]
"""Stores with the same window, ratio and kind (per sequence or not) share slots."""


def _key(store: Store, limits: Limits) -> _Key:
    open_ended = store.window is not None and store.window >= limits.max_seq_len
    return (None if open_ended else store.window, store.ratio, store.per_sequence)


def _empty_group(store: Store, window: int | None, ratio: int, per_sequence: bool) -> CacheGroup:
    name = "full" if store.window is not None and window is None else store.name
    return CacheGroup(
        name=name, slot_bytes=0, layers=0, window=window, ratio=ratio, per_sequence=per_sequence
    )


def _order(key: _Key) -> tuple[bool, bool, int, int]:
    window, ratio, per_sequence = key
    return per_sequence, window is not None, ratio, -(window or 0)


def check_stages(model: Model, limits: Limits) -> None:
    """Raise BadInputError for more pipeline stages than layers."""
    if limits.pipeline_parallel > len(model.layers):
        raise BadInputError(
            f"--pp: is {limits.pipeline_parallel} for {len(model.layers)} layers",
            remedy="give at most one stage a layer",
        )


def stages_of(model: Model, limits: Limits, *, last_have_more: bool = False) -> list[Layers]:
    """Return the layers of each pipeline stage, without those that draft tokens.

    Where it does not come out even the first stages have one more, or with `last_have_more` the
    last ones. Raises BadInputError for more stages than layers.
    """
    check_stages(model, limits)
    count = limits.pipeline_parallel
    each, more = divmod(len(model.layers), count)
    stages, begin = [], 0
    for stage in range(count):
        has_more = stage >= count - more if last_have_more else stage < more
        end = begin + each + has_more
        stages.append(model.layers[begin:end])
        begin = end
    return stages


def _store_bytes(store: Store, limits: Limits) -> int:
    """Return the bytes of one layer's part of a slot, on one rank."""
    entry = store.rank_bytes(limits.tensor_parallel)
    if store.per_sequence:
        return entry
    if limits.tokens_per_block % store.ratio:
        raise BadInputError(
            f"--tokens-per-block: is {limits.tokens_per_block}, no multiple of the "
            f"{store.ratio} tokens that become one entry of {store.name}",
            remedy=f"give a multiple of {store.ratio}, such as {round_up(256, store.ratio)}",
        )
    return entry * (limits.tokens_per_block // store.ratio)


def window_blocks(window: int, tokens_per_block: int, tokens: int = 1) -> int:
    """Return the most blocks that computing so many adjacent tokens looks at.

    They and the window - 1 before them are window - 1 + tokens in a row; n tokens in a row lie in
    at most ceil((n - 1) / tokens_per_block) + 1 blocks. With one token and a window that fits in a
    block it is 2 and not 1, as often as it lies across two of them: what TensorRT-LLM's pull
    request 15588 found.
    """
    return -(-(window + tokens - 2) // tokens_per_block) + 1


def slots_of_request(group: CacheGroup, limits: Limits, tokens: int) -> int:
    """Return the slots that a request with so many tokens holds while it decodes."""
    if group.per_sequence:
        return limits.beam_width * limits.states
    whole = -(-(tokens + limits.speculative_tokens) // limits.tokens_per_block)
    if group.window is None:
        return whole * limits.beam_width
    drafted = 1 + limits.speculative_tokens
    live = window_blocks(group.window, limits.tokens_per_block, drafted)
    return min(whole, live) * limits.beam_width


def min_slots(group: CacheGroup, limits: Limits) -> int:
    """Return the fewest slots of a group that serve `max_batch_size` requests.

    States: one for each sequence, and one more for each token that it drafts. Groups that keep all
    tokens: the longest request must fit, and every request have one block. Groups with a window:
    every sequence's window wherever it lies, and what a step's `max_num_tokens` of prompts need
    besides, for blocks that leave the window are freed after the step, and not within it.
    """
    if group.per_sequence:
        return limits.sequences * limits.states
    longest = slots_of_request(group, limits, limits.max_seq_len)
    if group.window is None:
        return max(longest, limits.sequences)
    return limits.sequences * (longest // limits.beam_width) + _chunk_slots(group.window, limits)


def _chunk_slots(window: int, limits: Limits) -> int:
    """Return the slots that a step's prompt tokens can add to those of decoding requests.

    A request whose chunk has 1 + e tokens looks at window_blocks(1 + e) blocks: the first block
    more comes with the tokens that are left in its last block, each further one with a whole block
    of tokens. A step's tokens go where they need most blocks: first to as many requests as there
    are, then on. No request has more blocks than the longest one.
    """
    block = limits.tokens_per_block
    decoding = window_blocks(window, block, 1 + limits.speculative_tokens)
    whole = -(-(limits.max_seq_len + limits.speculative_tokens) // block)
    room = max(0, whole - decoding)
    if room == 0:
        return 0
    free = max(0, limits.max_num_tokens - limits.max_batch_size)
    span = window - 1 + limits.speculative_tokens
    first = -span % block + 1
    begun = min(limits.max_batch_size, free // first)
    further = (free - begun * first) // block
    return min(begun + further, limits.max_batch_size * room)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSlots:
    """What one group has in one tier of memory."""

    group: CacheGroup
    min_slots: int
    per_request: int
    """Slots that a usual request holds."""
    slots: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots, as they lie in a region."""
        return self.slots * round_up(self.group.slot_bytes, SLOT_ALIGN_BYTES)

    @property
    def requests(self) -> int:
        """Usual requests that it has slots for at once."""
        return self.slots // self.per_request


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One kind of memory of one rank: the GPU's or the host's."""

    groups: tuple[GroupSlots, ...]
    has_directory: bool = False
    """Host memory has one behind the slots: which of them holds which block (docs/directory.md)."""

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes: each group from a page's beginning on, then the directory."""
        end = 0
        for group in self.groups:
            end = round_up(end, GROUP_ALIGN_BYTES) + group.size_bytes
        return end + self.directory_bytes

    @property
    def directory_bytes(self) -> int:
        """Bytes of the directory; 0 where there is none."""
        return directory_bytes(self.slots) if self.has_directory else 0

    @property
    def slots(self) -> int:
        """Slots of all groups."""
        return sum(group.slots for group in self.groups)

    @property
    def limiting(self) -> GroupSlots:
        """The group that is full first with usual requests."""
        return min(self.groups, key=lambda group: group.slots / group.per_request)

    def share(self, group: GroupSlots) -> float:
        """Return a group's part of all slots' bytes."""
        return group.size_bytes / sum(one.size_bytes for one in self.groups)


def floor_of(groups: Sequence[CacheGroup], limits: Limits, *, has_directory: bool = False) -> Tier:
    """Return the fewest slots that serve the limits. See hostprep.sizing.groups.

    Raises BadInputError for more slots than a layout can count.
    """
    return _tier(groups, limits, 0, has_directory)


def tier_of_bytes(
    groups: Sequence[CacheGroup],
    limits: Limits,
    size_bytes: int,
    *,
    option: str,
    has_directory: bool = False,
) -> Tier:
    """Return what so many bytes hold: the floor, and then as many usual requests as fit.

    Memory beyond what `max_batch_size` requests use keeps the blocks of finished ones, in the
    same proportion. Raises BadInputError, naming the option and what would do, where the floor
    does not fit.
    """
    least = floor_of(groups, limits, has_directory=has_directory)
    if least.size_bytes > size_bytes:
        raise _too_little(groups, limits, size_bytes, least, option)

    def fits(steps: int) -> bool:
        try:
            return _tier(groups, limits, steps, has_directory).size_bytes <= size_bytes
        except BadInputError:  # more slots than can be counted
            return False

    low, high = 0, 1
    while high < MAX_SLOTS * _STEPS and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return _tier(groups, limits, low, has_directory)


def tier_of_tokens(
    groups: Sequence[CacheGroup], limits: Limits, tokens: int, *, has_directory: bool = False
) -> Tier:
    """Return what holds so many tokens of usual requests, and the floor at least."""
    return _tier(groups, limits, -(-tokens * _STEPS // limits.typical), has_directory)


def _tier(groups: Sequence[CacheGroup], limits: Limits, steps: int, has_directory: bool) -> Tier:
    """Return the floor, or slots for so many 256ths of a usual request where that is more."""
    found = []
    for group in groups:
        least = min_slots(group, limits)
        usual = slots_of_request(group, limits, limits.typical)
        slots = max(least, -(-steps * usual // _STEPS))
        if slots > MAX_SLOTS:
            raise BadInputError(
                f"group {group.name} would have {slots} slots, and {MAX_SLOTS} can be",
                remedy="give fewer tokens or less memory, or more --tokens-per-block",
            )
        found.append(GroupSlots(group=group, min_slots=least, per_request=usual, slots=slots))
    return Tier(groups=tuple(found), has_directory=has_directory)


def _too_little(
    groups: Sequence[CacheGroup], limits: Limits, size_bytes: int, least: Tier, option: str
) -> BadInputError:
    """Say what would do: more memory, fewer requests at once, or shorter ones."""

    def largest(most: int, limits_for: Callable[[int], Limits]) -> int:
        """Return the largest number whose floor fits; 0 where none does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            tier = floor_of(groups, limits_for(middle), has_directory=least.has_directory)
            low, high = (middle, high) if tier.size_bytes <= size_bytes else (low, middle - 1)
        return low

    ways = [f"give {option} {-(-least.size_bytes >> 20)}Mi"]
    batch = largest(limits.max_batch_size, limits.for_batch)
    length = largest(limits.max_seq_len, limits.for_length)
    if batch:
        ways.append(f"or --max-batch-size {batch}")
    elif length:
        ways.append(f"or --max-seq-len {length}")
    elif length := largest(limits.max_seq_len, limits.for_batch(1).for_length):
        ways.append(f"or --max-batch-size 1 and --max-seq-len {length}")
    return BadInputError(
        f"{option}: {format_bytes(size_bytes)} a rank is less than the "
        f"{format_bytes(least.size_bytes)} without which requests can wait for ever",
        remedy=" ".join(ways),
    )
