"""Traces of requests against managers of vLLM's CPU tier, for benchmarks.eviction.

Run by vLLM's own interpreter, with vLLM's calls: a lookup of each chunk, a load of what was found,
a store of the rest in pieces, the end. Prints a line of JSON for each manager, trace and seed.
"""

from __future__ import annotations

import bisect
import itertools
import json
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from hostprep.engines.vllm.offloading_slots import SlotsManager

_WINDOW = 4
"""Chunks that a group with a window needs, and stores."""
_STORED_AT_ONCE = 16

Prompt = tuple[int, ...]
"""Its chunks, each named by a number; a key stands for a chunk and all before it."""


@dataclass(frozen=True)
class Scene:
    """A trace, and the tier that it meets."""

    prompts: Callable[[random.Random], Iterator[Prompt]]
    room: int
    """Chunks of the tier."""
    has_window: bool = False
    waiting: int = 0
    """Requests that are looked up this long before they are admitted: so many are between."""


def _zipf(chance: random.Random) -> Iterator[Prompt]:
    """Prompts drawn by rank, of 20 chunks and 2 of their own."""
    weights = list(itertools.accumulate(1 / (rank + 1) ** 0.9 for rank in range(1500)))
    fresh = itertools.count(10**6)
    while True:
        rank = bisect.bisect(weights, chance.random() * weights[-1])
        yield (*(rank * 100 + at for at in range(20)), next(fresh), next(fresh))


def _scan(chance: random.Random) -> Iterator[Prompt]:
    """Prompts by rank, and every third one a long one that never comes again."""
    ranked, fresh = _zipf(chance), itertools.count(2 * 10**6)
    while True:
        yield next(ranked)
        yield next(ranked)
        yield tuple(next(fresh) for _ in range(60))


def _chat(chance: random.Random) -> Iterator[Prompt]:
    """Conversations under one system prompt that go on for some turns."""
    fresh = itertools.count(3 * 10**6)
    open_ones: list[Prompt] = []
    while True:
        if len(open_ones) < 120 or chance.random() < 0.12:
            open_ones.append(tuple(range(8)))
        at = min(int(chance.expovariate(1 / 40)), len(open_ones) - 1)
        said = (*open_ones.pop(-1 - at), *(next(fresh) for _ in range(chance.randrange(2, 9))))
        if len(said) < 90:
            open_ones.append(said)
        del open_ones[:-200]
        yield said


def _documents(chance: random.Random) -> Iterator[Prompt]:
    """Questions about long documents."""
    fresh = itertools.count(4 * 10**6)
    while True:
        document = min(int(chance.expovariate(1 / 6)), 29)
        yield (*(document * 1000 + at for at in range(100)), next(fresh))


def _loop(chance: random.Random) -> Iterator[Prompt]:
    """Repeat the same prompts, a little more than there is room for."""
    del chance
    for number in itertools.count():
        yield tuple((number % 60) * 100 + at for at in range(40))


def _shift(chance: random.Random) -> Iterator[Prompt]:
    """Prompts by rank; after every 500 requests those of each second rank are others."""
    for number, prompt in enumerate(_zipf(chance)):
        others = number // 500 * 10**8 if prompt[0] // 100 % 2 else 0
        yield tuple(chunk + others if chunk < 10**6 else chunk for chunk in prompt)


def _tenants(chance: random.Random) -> Iterator[Prompt]:
    """Conversations, and in turns with them another tenant's prompts by rank and scans."""
    chats, others = _chat(chance), _scan(chance)
    while True:
        yield next(chats)
        yield tuple(chunk + 10**9 for chunk in next(others))


def _agents(chance: random.Random) -> Iterator[Prompt]:
    """Agents under one system prompt, with one of six sets of tools, that go on step by step.

    Every eighth request is about a long document, which is seldom asked about twice.
    """
    fresh = itertools.count(5 * 10**6)
    runs: list[Prompt] = []
    while True:
        for _ in range(7):
            if len(runs) < 40 or chance.random() < 0.08:
                tools = 1000 + 100 * min(int(chance.expovariate(1 / 1.5)), 5)
                runs.append((*range(12), *range(tools, tools + 20)))
            at = chance.randrange(len(runs))
            said = (*runs.pop(at), *(next(fresh) for _ in range(chance.randrange(1, 5))))
            if len(said) < 70:
                runs.append(said)
            yield said
        document = tuple(next(fresh) for _ in range(120))
        yield document
        if chance.random() < 0.3:
            yield (*document, next(fresh))


SCENES = {
    "skewed prompts": Scene(_zipf, 4000),
    "skewed, with scans": Scene(_scan, 4000),
    "chat": Scene(_chat, 2500),
    "hybrid chat": Scene(_chat, 3000, has_window=True),
    "long documents, small tier, a queue": Scene(_documents, 1000, waiting=4),
    "a loop": Scene(_loop, 2000),
    "ranks that shift": Scene(_shift, 4000),
    "two tenants": Scene(_tenants, 4000),
    "agents and long documents": Scene(_agents, 1200),
}
MANAGERS: dict[str, Callable[[int], Any]] = {
    "vLLM's LRU": lambda room: CPUOffloadingManager(num_chunks=room),
    "vLLM's ARC": lambda room: CPUOffloadingManager(num_chunks=room, cache_policy="arc"),
    "hostprep.slots": SlotsManager,
    "slots, 1/32 free": lambda room: SlotsManager(room - room // 32),
}
"""The last one: as a pool that keeps slots free, so that blocks lie in rows (`spare`)."""


class _Request:
    def __init__(self, number: int, prompt: Prompt, *, has_window: bool) -> None:
        self.context = ReqContext(req_id=f"r{number}")
        digest, hashes = 0, []
        for chunk in prompt:
            digest = hash((digest, chunk))
            hashes.append((digest & (1 << 64) - 1).to_bytes(8, "big") * 4)
        groups = 2 if has_window else 1
        self.keys = [[make_offload_key(one, group) for one in hashes] for group in range(groups)]
        for keys in self.keys:
            for at, key in enumerate(keys):
                self.context.set_offload_key_position(key, at + 1)


def _hits(manager: Any, request: _Request) -> int:
    """Return how many chunks a request can begin with."""
    prefix, *windows = request.keys
    found = len(list(itertools.takewhile(lambda key: _has(manager, key, request), prefix)))
    for keys in windows:
        end = run = 0
        for at in range(found - 1, -1, -1):
            run = run + 1 if _has(manager, keys[at], request) else 0
            end = at + run
            if run == _WINDOW:
                break
        found = end if run else 0
    return found


def _has(manager: Any, key: Any, request: _Request) -> bool:
    return manager.lookup(key, request.context) is LookupResult.HIT


def _serve(manager: Any, request: _Request) -> int:
    """Load and store as vLLM's scheduler does for one that is admitted; return its hits."""
    context = request.context
    hits = _hits(manager, request)
    if hits:
        keys = list(request.keys[0][:hits])
        for window in request.keys[1:]:
            keys += window[max(0, hits - _WINDOW) : hits]
        manager.prepare_load(keys, context)
    manager.on_schedule_end(ScheduleEndContext((context.req_id,), ()))
    if hits:
        manager.complete_load(set(keys), context)
    whole = len(request.keys[0])
    for begin in range(hits, whole, _STORED_AT_ONCE):
        offered = list(request.keys[0][begin : begin + _STORED_AT_ONCE])
        for window in request.keys[1:]:
            low = max(begin, whole - 2 * _WINDOW)
            offered += window[low : max(low, begin + _STORED_AT_ONCE)]
        stored = manager.prepare_store(offered, context)
        if stored is not None and stored.keys_to_store:
            manager.complete_store(set(stored.keys_to_store), context)
    manager.on_request_finished(context)
    return hits


def play(manager: Any, scene: Scene, seed: int, requests: int) -> dict[str, float]:
    """Return the share of chunks that hit, the first third not counted, and µs a chunk."""
    prompts = scene.prompts(random.Random(seed))
    queue: deque[_Request] = deque()
    hits = chunks = every = 0
    spent_s = 0.0
    for number in range(requests):
        request = _Request(number, next(prompts), has_window=scene.has_window)
        begin = time.thread_time()
        manager.on_new_request(request.context)
        queue.append(request)
        for waiting in queue:  # as in each step in which they may be scheduled
            _hits(manager, waiting)
        if len(queue) <= scene.waiting:
            spent_s += time.thread_time() - begin
            continue
        admitted = queue.popleft()
        found = _serve(manager, admitted)
        list(manager.take_events())
        spent_s += time.thread_time() - begin
        every += len(admitted.keys[0])
        if number >= requests // 3:
            hits += found
            chunks += len(admitted.keys[0])
    return {"hits": hits / chunks * 100, "us": spent_s / every * 1e6}


def main() -> None:
    """Play everything; arguments: seeds, requests."""
    seeds, requests = int(sys.argv[1]), int(sys.argv[2])
    for trace, scene in SCENES.items():
        for seed in range(seeds):
            for name, make in MANAGERS.items():  # in turns, so that load falls on all alike
                result = play(make(scene.room), scene, seed, requests)
                print(json.dumps({"trace": trace, "manager": name, **result}), flush=True)


if __name__ == "__main__":
    main()
