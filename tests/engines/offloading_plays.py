"""Plays of vLLM's scheduler against a manager of its interface: vLLM's own, or ours of slots.

Requests are looked up while they wait, load, compute and offer what they computed, as
vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py has them do. Every answer is
held against what each chunk holds. With slots also against who may evict what.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from hostprep.engines.vllm.identity import Identity
from hostprep.engines.vllm.keeping import KEY_BYTES, Keeper
from hostprep.engines.vllm.offloading_slots import SlotsManager, slots_layout
from hostprep.paths import PoolPaths
from hostprep.slots import Directory

_KEEPING: Any = importlib.import_module("hostprep.engines.vllm.keeping")
_POOL: Any = importlib.import_module("hostprep.slots.pool")


class Request:
    """A request as the scheduler sees it; its chunks are named by their whole prefix."""

    def __init__(self, number: int, path: str, groups: int, *, has_positions: bool) -> None:
        self.path = path
        self.context = ReqContext(req_id=f"r{number}")
        self.keys = [
            [
                make_offload_key(path[: end + 1].encode().rjust(32), group)
                for end in range(len(path))
            ]
            for group in range(groups)
        ]
        if has_positions:
            for keys in self.keys:
                for end, key in enumerate(keys):
                    self.context.set_offload_key_position(key, end + 1)
        self.state = "waiting"
        self.computed = self.next_stored = 0
        self.loads: list[bytes] = []
        self.told: set[bytes] = set()
        """What it claims: told to be there, and not given up since."""


def name_of(key: bytes) -> str:
    return f"{key[:-4].decode().strip()}/{key[-1]}"


def gauges_of(stats: Any) -> Any:
    """Return what both managers count alike: claims of those who wait are counted by ours alone."""
    values = stats.data["data"]
    return {
        name: values[name][()]
        for name in (
            CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC,
            CPUOffloadingMetrics.CPU_ALLOCATION_SIZE,
        )
        if name in values
    }


_WINDOW = 2
"""Chunks that a group with a window needs: those at the end of what is loaded."""


class Play:
    """One engine's life: `steps` in, what was answered out. Raises AssertionError."""

    def __init__(
        self,
        inner: str,
        room: int,
        *,
        windows: bool = False,
        positions: bool = True,
        keeps: bool = False,
    ) -> None:
        """With `keeps`, slots with a directory, which outlives `_killed`."""
        self.has_slots = inner == "slots"
        self.room = room
        self.groups = 2 if windows else 1
        self.positions = positions
        self.manager: Any = (
            SlotsManager(room, has_events=True)
            if self.has_slots
            else CPUOffloadingManager(num_chunks=room, enable_events=True)
        )
        self.keeper: Keeper | None = None
        self.requests: list[Request] = []
        self.waiting: list[Request] = []
        """Of which something is claimed, the first first."""
        self.began: list[Request] = []
        self.content: dict[int, bytes] = {}
        self.jobs: list[tuple[Request, list[bytes], list[int], set[bytes]]] = []
        self.seen: dict[str, Any] = {
            name: [] for name in ("answers", "stored", "evicted", "hits", "events", "gauges")
        }
        self.seen["refused"] = self.seen["overtaken"] = 0
        self.memory = bytearray(Directory.size_bytes_for(room, KEY_BYTES))
        self.recorded: dict[int, bytes] = {}
        """What a next engine may believe of chunks: evicting leaves it, writing does not."""
        self.unrecorded: set[int] = set()
        """Chunks that were written, or begun, since they were last recorded."""
        self.quarantined: set[int] = set()
        self.now_s = 0.0
        if keeps:
            self._start()

    def play(self, steps: list[Any]) -> dict[str, Any]:
        for step, *arguments in steps:
            getattr(self, f"_{step}")(*arguments)
        self._all_ends()
        return self.seen

    @property
    def ready(self) -> set[bytes]:
        return set(self.content.values())

    @property
    def writing(self) -> set[bytes]:
        return {key for _, keys, _, _ in self.jobs for key in keys}

    def _start(self) -> None:
        """Begin over what a dead engine left, as one with the same identity does."""
        if self.keeper is not None:
            self.keeper.close()  # its thread ends
        _POOL.time = SimpleNamespace(monotonic=lambda: self.now_s)
        directory = Directory(
            memoryview(self.memory), slots_layout(self.room, 1), key_bytes=KEY_BYTES
        )
        self.keeper = keeper = Keeper(
            "play",
            directory,
            engine=Identity({"engine": "play"}),
            paths=PoolPaths("/nowhere", "kv"),
            region="r0",
            chunk_bytes=1,
            deadline_s=600,
        )
        self.manager = SlotsManager(self.room, keeper=keeper, has_events=True)
        _KEEPING._seed = lambda: Identity({})
        _KEEPING.write_warm_report = lambda *_, **__: None
        keeper._is_attached, keeper._recover = True, self.manager.recover
        keeper._weights = Identity({"weights": "play"})
        keeper.add_ranks(Identity({}))
        keeper.poll()
        assert keeper.is_open
        (kept,) = directory.read()
        assert (
            set(kept.slots)
            == set(self.recorded.values())
            == set(self.manager.pool.recovered_hashes())
        )
        self.content = {chunk: key for key, chunk in kept.slots.items()}
        assert self.content.items() <= self.recorded.items()
        self.quarantined = set(self.unrecorded)
        assert set(kept.writing) == self.quarantined

    def _killed(self) -> None:
        """Nothing that it began ends; the next one knows none of its requests."""
        self.requests.clear()
        self.waiting.clear()
        self.began.clear()
        self.jobs.clear()
        self._start()

    def _later(self) -> None:
        """The quarantine ends with the next claim."""
        self.now_s += 61
        self.quarantined.clear()
        self.manager.pool.claim_batch([])

    def _new(self, path: str) -> None:
        request = Request(len(self.requests), path, self.groups, has_positions=self.positions)
        if self.keeper is not None:
            adapter = None if self._is_kept(request) else "an adapter"
            named = SimpleNamespace(request_id=request.context.req_id, lora_request=adapter)
            self.keeper.add_request(named)
        self.manager.on_new_request(request.context)
        self.requests.append(request)

    @staticmethod
    def _is_kept(request: Request) -> bool:
        return not request.path.startswith("b")

    def _look(self, number: int, admit: bool, local: int = 0) -> None:
        """Look a waiting request up from a chunk on; admit it in the same step, or have it wait."""
        request = self._of_state(number, "waiting")
        if request is None:
            return
        local = min(local, len(request.path))
        hits = self._hits(request, local)
        self.seen["hits"].append(hits)
        if admit and hits is not None:
            self._admit(request, local, hits)

    def _hits(self, request: Request, local: int) -> int | None:
        """Return up to which chunk the request can load; None where some are being written."""
        prefix, *windows = request.keys
        end, is_pending = local, False
        while end < len(prefix):
            answer = self._ask(request, prefix[end])
            if answer is LookupResult.MISS:
                break
            is_pending |= answer is LookupResult.HIT_PENDING
            end += 1
        for keys in windows:
            found = run = 0
            for at in range(end - 1, local - 1, -1):
                answer = self._ask(request, keys[at])
                is_pending |= answer is LookupResult.HIT_PENDING
                run = 0 if answer is LookupResult.MISS else run + 1
                found = at + run
                if run == _WINDOW:
                    break
            end = found if run else local
        return None if is_pending else end

    def _ask(self, request: Request, key: Any) -> LookupResult:
        answer: LookupResult = self.manager.lookup(key, request.context)
        expected = (
            LookupResult.HIT
            if key in self.ready
            else LookupResult.HIT_PENDING
            if key in self.writing
            else LookupResult.MISS
        )
        assert answer is expected, (answer, expected)
        self.seen["answers"].append(answer.name)
        if answer is LookupResult.HIT:
            if request not in self.waiting:
                self.waiting.append(request)
            request.told.add(key)
        return answer

    def _admit(self, request: Request, local: int, hits: int) -> None:
        request.computed = request.next_stored = hits
        prefix, *windows = request.keys
        keys = prefix[local:hits]
        for each in windows:
            keys = keys + each[max(local, hits - _WINDOW) : hits]
        if hits <= local:
            request.state = "running"
            self.began.append(request)
            return
        chunks = self.manager.prepare_load(keys, request.context).block_ids.tolist()
        assert [self.content[chunk] for chunk in chunks] == keys
        request.state, request.loads = "loading", keys
        request.told = set(keys)
        if request in self.waiting:
            self.waiting.remove(request)

    def _loaded(self, number: int) -> None:
        loading = [one for one in self.requests if one.loads]
        if loading:
            request = loading[number % len(loading)]
            self._end_load(request)
            if request.state == "loading":
                request.state = "running"
                self.began.append(request)

    def _end_load(self, request: Request) -> None:
        self.manager.complete_load(set(request.loads), request.context)
        request.loads = []
        request.told.clear()

    def _run(self, number: int, chunks: int) -> None:
        """Compute some chunks more of a running request, and offer what was not offered."""
        request = self._of_state(number, "running")
        if request is None:
            return
        request.computed = min(len(request.path), request.computed + chunks)
        offered = [
            key for keys in request.keys for key in keys[request.next_stored : request.computed]
        ]
        if offered:
            self._offer(request, offered)

    def _offer(self, request: Request, offered: list[bytes]) -> None:
        self._leaves(request)
        new = [key for key in offered if key not in self.ready | self.writing]
        has_room = self._make_room(new, set(offered)) if self.has_slots else None
        output = self.manager.prepare_store(list(offered), request.context)
        assert has_room in (None, output is not None), (has_room, output)
        if output is None:
            self.seen["refused"] += 1
            self._check_claims()
            return
        request.next_stored = request.computed
        assert output.keys_to_store == new
        chunks = output.store_spec.block_ids.tolist()
        self._check_evicted(output.evicted_keys, chunks, set(offered))
        assert not self.quarantined & set(chunks)
        self.unrecorded.update(chunks)
        for chunk in chunks:
            self.recorded.pop(chunk, None)
        self.seen["stored"] += [name_of(key) for key in new]
        if new:
            self.jobs.append((request, new, chunks, set(offered)))
        self._check_claims()

    def _make_room(self, new: list[bytes], offered: set[bytes]) -> bool:
        """Give up claims as the rule says, the latest first; tell whether the store has room.

        None is given up where all of them are not enough.
        """
        free = self.room - len(self.content) - len(self.writing) - len(self.quarantined)
        told = [one.told for one in self.requests if one not in self.waiting]
        stays = offered.union(*told, *(stored for _, _, _, stored in self.jobs))
        if len(new) > free + len(self.ready - stays):
            return False
        while len(new) > free + len(self.ready - self._pinned() - offered):
            self.waiting.pop().told.clear()
        return True

    def _pinned(self) -> set[bytes]:
        """Everything that a store must leave alone."""
        told = [one.told for one in self.requests]
        return set().union(*told, *(offered for _, _, _, offered in self.jobs))

    def _check_claims(self) -> None:
        """Nothing is claimed but what somebody was told, loads, or stores."""
        if self.has_slots:
            (usage,) = self.manager.pool.usage()
            assert usage.claimed == len(self._pinned()) + len(self.quarantined)

    def _check_evicted(self, evicted: list[bytes], chunks: list[int], offered: set[bytes]) -> None:
        busy = {chunk for _, _, used, _ in self.jobs for chunk in used}
        assert len(set(chunks)) == len(chunks)
        assert not busy & set(chunks)
        loading = {key for one in self.requests for key in one.loads}
        gone = set(evicted)
        assert len(gone) == len(evicted)
        assert not gone & (loading | offered)
        assert gone <= self.ready
        for chunk in [chunk for chunk, key in self.content.items() if key in gone]:
            del self.content[chunk]
        assert not self.content.keys() & set(chunks), "a chunk was taken that was not evicted"
        assert all(0 <= chunk < self.room for chunk in chunks)
        told = set().union(*(one.told for one in self.requests if one.state == "waiting"))
        self.seen["overtaken"] += len(gone & told)
        self.seen["evicted"] += [name_of(key) for key in evicted]
        assert not (self.has_slots and gone & told)
        for one in self.requests:
            one.told -= gone

    def _stored(self, number: int) -> None:
        if self.jobs:
            request, keys, chunks, _ = self.jobs.pop(number % len(self.jobs))
            self.manager.complete_store(set(keys), request.context)
            self.content.update(zip(chunks, keys, strict=True))
            if self._is_kept(request):
                self.recorded.update(zip(chunks, keys, strict=True))
                self.unrecorded.difference_update(chunks)

    def _failed(self, number: int) -> None:
        if not self.jobs:
            return
        request, keys, _, _ = self.jobs.pop(number % len(self.jobs))
        self.manager.complete_store(set(keys), request.context, success=False)

    def _finish(self, number: int) -> None:
        """End a request in whatever state: one that loads is told of its load later."""
        alive = [one for one in self.requests if one.state != "finished"]
        if alive:
            request = alive[number % len(alive)]
            if not request.loads:
                self._leaves(request)
            request.state = "finished"
            self.manager.on_request_finished(request.context)

    def _end(self) -> None:
        """End a step: what began to run is no longer waiting."""
        ids = [one.context.req_id for one in self.began]
        self.manager.on_schedule_end(ScheduleEndContext(ids, ()))
        for one in self.began:
            if one in self.waiting:
                self.waiting.remove(one)
                one.told.clear()
        self.began.clear()
        self.seen["events"] += [
            (sorted(map(name_of, event.keys)), event.removed)
            for event in self.manager.take_events()
        ]
        self.seen["gauges"].append(gauges_of(self.manager.get_stats()))

    def _reset(self) -> None:
        """Forget all, jobs and loads as well: vLLM never reports those again."""
        self.manager.reset_cache()
        self.content.clear()
        self.recorded.clear()
        self.jobs.clear()
        self.waiting.clear()
        for one in self.requests:
            one.told.clear()
            one.next_stored = 0
            if one.state == "loading":
                one.state = "running"
            one.loads = []

    def _leaves(self, request: Request) -> None:
        """A request that runs, or is finished, waits for nothing."""
        if not request.loads:
            request.told.clear()
            if request in self.waiting:
                self.waiting.remove(request)

    def _of_state(self, number: int, state: str) -> Request | None:
        found = [one for one in self.requests if one.state == state]
        return found[number % len(found)] if found else None

    def _all_ends(self) -> None:
        """End everything that goes on: nothing may be claimed then."""
        for one in self.requests:
            if one.loads:
                self._end_load(one)
            if one.state != "finished":
                self.manager.on_request_finished(one.context)
        while self.jobs:
            self._stored(0)
        if self.has_slots:
            (usage,) = self.manager.pool.usage()
            left = (self.manager.pool.open_claims(), usage.claimed)
            assert left == (0, len(self.quarantined))
            assert usage.cached == len(self.content)
            assert not self.manager._reads._ended
        if self.keeper is not None:
            self.keeper.close()
