"""From a model's sizing to the pool that fits how its engine attaches: regions, and their bytes.

An engine claims regions in its own way (hostprep.engines.catalogue): one for all its ranks, or
several as one cache. A pool of other regions would work, and most of it would lie idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hostprep.api.pool_spec import DEFAULT_BACKINGS, RegionLayout
from hostprep.api.slot_layout import GROUP_ALIGN_BYTES, SLOT_ALIGN_BYTES, SlotLayout, round_up
from hostprep.backing import Backing
from hostprep.engines.catalogue import INTEGRATIONS, integration_of
from hostprep.errors import BadInputError
from hostprep.known_issues import ONE_CALL_LIMIT_BYTES
from hostprep.layout import RECURRENT
from hostprep.sizing.engines.rules import EngineSizing
from hostprep.sizing.engines.vllm_host import WAYS, HostPool
from hostprep.sizing.size import Memory, Sizing
from hostprep.units import format_bytes

_USUAL = {"vllm": "vllm-offloading", "sglang": "sglang", "trtllm": "lmcache"}
"""What is taken for an engine where no integration is named: the first one of its page in the
documentation. TensorRT-LLM has no memory that could be prepared; an LMCache server keeps its."""
_ENGINES = {
    "vllm": "vllm",
    "vllm-offloading": "vllm",
    "vllm-simple": "vllm",
    "lmcache-inprocess": "vllm",
    "sglang": "sglang",
}
"""Whose rules say what the ranks keep; a server of its own keeps what any engine brings."""
_SERVERS = ("lmcache", "mooncake")
"""Processes beside the engines: one has all regions that it is given."""
_SINGLE = RegionLayout.SINGLE.value
_PER_GPU = RegionLayout.PER_GPU.value


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """How a pool is cut, for a model and what attaches to it."""

    integration: str
    """Empty: connectors divide the regions, by their layout."""
    sizing: dict[str, Any]
    """The pool's `spec.sizing`, as the custom resource has it."""
    regions: int | str
    """Its `spec.regions`."""
    backings: tuple[Backing, ...]
    ranks: int
    """That share what one engine claims."""
    engine: str = ""
    """Whose rules say how many blocks it has, with the release that they were read from."""
    host: HostPool | None = None
    """How the engine divides a region into blocks; None where its integration is given bytes."""
    notes: tuple[str, ...] = ()
    """What the engine's rules say of such memory where it is given bytes."""

    def blocks(self, region_bytes: int) -> dict[Backing, int]:
        """Return the host blocks that an engine has in one region, by its backing.

        Smaller pages need less padding: there may be a few more. Empty where it is given bytes.
        """
        if self.host is None:
            return {}
        host = replace(self.host, has_directory=False)
        return {
            backing: replace(host, page_bytes=backing.page_bytes).blocks(region_bytes)
            for backing in self.backings
        }

    def kept_blocks(self, region_bytes: int) -> int | None:
        """Return the same for the first backing with `hostprep exec --warm`; None without it."""
        if self.host is None or not self.host.has_directory:
            return None
        return replace(self.host, page_bytes=self.backings[0].page_bytes).blocks(region_bytes)

    @property
    def regions_per_engine(self) -> int:
        """How many regions one engine, or one server, claims."""
        return int(self.sizing["regionsPerEngine"])

    def command(self, pool: str) -> str:
        """Return an example of the command that claims it."""
        count = self.regions_per_engine
        options = f"exec {pool}" + (f" --count {count}" if count > 1 else "")
        if not self.integration:
            return f"hostprep {options} -- COMMAND"
        return integration_of(self.integration).example.replace("exec kv", options, 1)

    def describe(self, pool: str, region_bytes: int) -> tuple[str, ...]:
        """Say in a few lines what claims the regions, and what it has in them."""
        count, size = self.regions_per_engine, format_bytes(region_bytes)
        if not self.integration:
            return (
                f"A region of {size} for each rank, for a connector that divides it by its layout:",
                f"  {self.command(pool)}",
                "An engine of `hostprep engines` claims others: give --engine, or --integration.",
            )
        if self.integration in _SERVERS:
            whose = "one server"
        else:
            whose = "its rank" if self.ranks == 1 else f"its {self.ranks} ranks together"
        head = f"{'A region' if count == 1 else f'{count} regions'} of {size} for {whose}:"
        lines = [head, f"  {self.command(pool)}"]
        if isinstance(self.regions, int) and self.regions > count:
            each = self.regions // count
            lines.append(
                f"Each node has {self.regions}, for {each} engines or data-parallel ranks."
            )
        lines += self.notes
        blocks = self.blocks(region_bytes)
        if blocks:
            first = self.backings[0]
            kept = self.kept_blocks(region_bytes)
            text = f"{self.engine} has {blocks[first]} host blocks in it"
            text += f", {kept} with --warm" if kept is not None else ""
            others = [f"{each} {n}" for each, n in blocks.items() if n != blocks[first]]
            lines.append(text + (f" ({first}; {', '.join(others)})" if others else "") + ".")
        return tuple(lines)


def chosen_integration(engine: str | None, integration: str | None) -> str:
    """Return what will claim the pool, by its name; empty where neither says.

    Raises BadInputError for an unknown integration, one of another engine, and one that claims
    nothing.
    """
    if integration is None:
        return "" if engine is None else _USUAL[engine]
    try:
        integration_of(integration)
    except BadInputError as error:
        names = ", ".join(each.name for each in INTEGRATIONS if each.name != "trtllm")
        raise BadInputError(
            f"--integration: {error.message}",
            remedy=f"choose from {names}; another engine's connector has its own: leave it out",
        ) from error
    if integration == "trtllm":
        raise BadInputError(
            "--integration: TensorRT-LLM's own host pools cannot be prepared memory",
            remedy="give --integration lmcache or mooncake: a server keeps its blocks "
            "(docs/engines/trtllm.md)",
        )
    if engine not in (None, _ENGINES.get(integration, engine)):
        raise BadInputError(
            f"--integration: {integration} is of {_ENGINES[integration]}, and --engine says "
            f"{engine}",
            remedy=f"leave --engine out, or give --integration {_USUAL[str(engine)]}",
        )
    return integration


def engine_of(integration: str) -> str | None:
    """Return the engine whose rules an integration's regions are sized by; None: any engine's."""
    return _ENGINES.get(integration)


def shape_pool(
    sizing: Sizing,
    engine: EngineSizing | None,
    memory: Memory,
    *,
    integration: str = "",
    backings: Sequence[Backing] = DEFAULT_BACKINGS,
    regions: str | None = None,
) -> PoolShape:
    """Return the shape of a pool with that sizing.

    `engine`: what its rules say, where one is named; `memory`: what was asked for; `integration`:
    as `chosen_integration` has it. `backings` and `regions` are options, the usual ones where they
    are not given. Raises BadInputError where they make no pool, with the option named.
    """
    page_bytes = max(GROUP_ALIGN_BYTES, *(backing.page_bytes for backing in backings))
    ranks, host = sizing.limits.ranks, None
    if integration and ranks > 1 and regions == _PER_GPU:
        raise BadInputError(
            f"--regions: {_PER_GPU} is a region for each GPU, and an engine with {ranks} claims "
            "one for all of them",
            remedy="give the number of engines on each node, or leave it out for one",
        )
    if integration in WAYS:
        host = _host_pool(sizing, engine, integration, page_bytes)
        plan = _counted(sizing, engine, host, memory)
    elif integration:
        rank_bytes = _rank_bytes(sizing, engine, memory, integration)
        plan = _in_bytes(
            sizing,
            engine,
            rank_bytes,
            integration=integration,
            page_bytes=page_bytes,
            regions=regions,
        )
    else:
        plan = _Plan(_layout_spec(sizing.layout) | {"regionsPerEngine": ranks}, ranks)
    asked: int | str = plan.regions if regions is None else regions
    return PoolShape(
        integration=integration,
        sizing=plan.sizing,
        regions=int(asked) if str(asked).isdigit() else asked,
        backings=tuple(backings),
        ranks=ranks,
        engine=f"{integration_of(integration).engine} {engine.version}" if host and engine else "",
        host=host,
        notes=(
            *(() if host else _notes(engine, integration)),
            *_cut(plan, memory, ranks, page_bytes),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the pool's sizing says, and how many regions are usual."""

    sizing: dict[str, Any]
    regions: int | str


def _notes(engine: EngineSizing | None, integration: str) -> tuple[str, ...]:
    """Say what an engine, or a server, has in regions that it is given as bytes."""
    if not integration:
        return ()
    name = integration_of(integration).engine
    host = engine.host_by(integration) if engine else None
    if engine is None or host is None:
        return (f"How many tokens that is {name} itself says: it divides the bytes as it is set.",)
    what = f"{name} {engine.version} has {host.blocks} host blocks on each rank in it"
    return (f"{what}:", *(f"  {note}" for note in host.notes))


def _cut(plan: _Plan, memory: Memory, ranks: int, page_bytes: int) -> tuple[str, ...]:
    """Say how much of what was asked for is no whole page, where that is more than a tenth."""
    region_bytes = plan.sizing.get("regionBytes")
    if region_bytes is None or memory.host_bytes is None:
        return ()
    asked_bytes = memory.host_bytes * ranks
    missing_bytes = asked_bytes - region_bytes * plan.sizing["regionsPerEngine"]
    if missing_bytes * 10 <= asked_bytes:
        return ()
    less, asked = format_bytes(missing_bytes), format_bytes(asked_bytes)
    page = format_bytes(page_bytes)
    return (f"It is {less} less than {asked}: whole pages of {page}, or what --backing names.",)


def _host_pool(
    sizing: Sizing, engine: EngineSizing | None, integration: str, page_bytes: int
) -> HostPool:
    """Return how the ranks of one engine divide a region into blocks."""
    host = engine.host_by(integration) if engine else None
    if engine is None or host is None or engine.block_bytes < 1:
        if engine is not None and all(store.per_sequence for store in sizing.model.stores):
            raise BadInputError(
                f"--integration: {engine.engine} has no host tier for {sizing.model.name}, whose "
                "layers all keep states",
                remedy="it needs no pool; leave -o yaml out",
            )
        if engine is not None:
            raise BadInputError(
                f"--pp: with {sizing.limits.pipeline_parallel} stages of different size the host "
                f"blocks of {sizing.model.name} are not known",
                remedy="give a --pp that divides the layers evenly, or leave it out",
            )
        raise BadInputError(
            f"--integration: the size of a host block of {sizing.model.name} is not known without "
            "its engine's rules",
            remedy=f"give --engine {_ENGINES[integration]}",
        )
    ranks = sizing.limits.ranks
    return HostPool(
        way=integration,
        block_bytes=engine.block_bytes,
        ranks=ranks,
        is_replicated=host.copies < ranks,
        page_bytes=page_bytes,
        has_directory=integration_of(integration).keeps,
    )


def _counted(sizing: Sizing, engine: EngineSizing | None, pool: HostPool, memory: Memory) -> _Plan:
    """One region for all ranks of an engine, with as many bytes as whole blocks take.

    Of --host-memory it is at most that, with as many blocks as that has with --warm and without
    (where pages are so large that the directory leaves none, it has them only without); else it
    has with either what the engine's rules have for the tokens.
    """
    host = engine.host_by(pool.way) if engine else None
    wanted = plain = host.blocks if host else 0
    without = replace(pool, has_directory=False)
    if memory.host_bytes is not None:
        asked_bytes = memory.host_bytes * pool.ranks
        whole_bytes = asked_bytes // pool.page_bytes * pool.page_bytes
        wanted, plain = pool.blocks(whole_bytes), without.blocks(whole_bytes)
        if plain < 1:
            raise BadInputError(
                f"--host-memory: {format_bytes(asked_bytes)} for {pool.ranks} rank(s) holds no "
                f"block of {format_bytes(pool.row_bytes)} in pages of "
                f"{format_bytes(pool.page_bytes)}",
                remedy=f"give {-(-without.region_bytes(1) // pool.ranks >> 20)}Mi or more, or "
                "--backing without the largest pages",
            )
    slot_bytes = pool.block_bytes * pool.copies
    group = {"name": "blocks", "slotBytes": slot_bytes, "slots": wanted or plain}
    tokens = max((one.tokens_per_block for one in engine.groups), default=0) if engine else 0
    return _Plan(
        {
            "model": sizing.model.name,
            "tokensPerBlock": tokens or sizing.limits.tokens_per_block,
            "integration": pool.way,
            "regionsPerEngine": 1,
            "regionBytes": max(
                pool.region_bytes(wanted) if wanted else 0, without.region_bytes(plain)
            ),
            "groups": [group],
        },
        _SINGLE,
    )


def _rank_bytes(
    sizing: Sizing, engine: EngineSizing | None, memory: Memory, integration: str
) -> int:
    """Return the bytes of each rank: as asked for, else as the engine's rules or ours have them."""
    if memory.host_bytes is not None:
        return memory.host_bytes
    found = engine.host_by(integration) if engine else None
    return -(-found.size_bytes // sizing.limits.ranks) if found else sizing.host.size_bytes


def _in_bytes(
    sizing: Sizing,
    engine: EngineSizing | None,
    rank_bytes: int,
    *,
    integration: str,
    page_bytes: int,
    regions: str | None,
) -> _Plan:
    """One region for all ranks, or several for one server, of as many bytes as were asked for."""
    ranks = sizing.limits.ranks
    count = 1
    if integration in _SERVERS:
        most_bytes = ONE_CALL_LIMIT_BYTES - page_bytes
        if regions is not None and not regions.isdigit():
            raise BadInputError(
                f"--regions: is {regions[:40]}, and a server of {integration} is told how many "
                "regions it has",
                remedy="give a number, or leave it out",
            )
        count = int(regions or 0) or -(-rank_bytes * ranks // most_bytes)
        region_bytes = round_up(-(-rank_bytes * ranks // count), page_bytes)
    else:
        share_bytes = round_up(rank_bytes, page_bytes)  # each rank has whole pages of it
        region_bytes = share_bytes * ranks
        if integration == "lmcache-inprocess" and share_bytes >= ONE_CALL_LIMIT_BYTES:
            raise BadInputError(
                f"--host-memory: {format_bytes(share_bytes)} a rank are registered with CUDA by "
                f"one call, which fails from {format_bytes(ONE_CALL_LIMIT_BYTES)} on",
                remedy="give less, or --integration lmcache, whose server has several regions",
            )
    layout = {
        **_groups_in_bytes(sizing, engine, integration, region_bytes, count),
        "directory": False,
        "integration": integration,
        "regionsPerEngine": count,
        "regionBytes": region_bytes,
    }
    return _Plan(layout, _SINGLE if count == 1 else count)


def _groups_in_bytes(
    sizing: Sizing,
    engine: EngineSizing | None,
    integration: str,
    region_bytes: int,
    regions: int,
) -> dict[str, Any]:
    """Return the groups of each region, with the model and the tokens of a block.

    With an engine, what its rules say: blocks, where they are all of one size and fit as a layout
    rounds them. Otherwise how it divides a region is its own to say, and no groups but pages are:
    the plain reckoning's may contradict it. Without an engine they are the plain reckoning's.
    """
    if engine is None:
        layout = _layout_spec(sizing.layout)
        for group in layout["groups"]:  # all ranks' parts together, in as many regions
            group["slotBytes"] *= sizing.limits.ranks
            group["slots"] = max(1, group["slots"] // regions)
            group["minSlots"] = min(group["minSlots"], group["slots"])
        return layout
    group = {
        "name": "pages",
        "slotBytes": GROUP_ALIGN_BYTES,
        "slots": region_bytes // GROUP_ALIGN_BYTES,
    }
    host = engine.host_by(integration)
    if host is not None and engine.block_bytes and host.blocks:
        slot_bytes = round_up(host.block_bytes, SLOT_ALIGN_BYTES)
        if slot_bytes * host.blocks <= region_bytes:
            group = {"name": "blocks", "slotBytes": host.block_bytes, "slots": host.blocks}
    return {
        "model": sizing.model.name,
        "tokensPerBlock": sizing.limits.tokens_per_block,
        "groups": [group],
    }


def _layout_spec(layout: SlotLayout) -> dict[str, Any]:
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
        "directory": layout.has_directory,
        "groups": groups,
    }
