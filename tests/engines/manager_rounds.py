"""Rounds of requests against a manager behind our gate; runs in vLLM's interpreter.

Reads one round a line, a JSON object (`inner`: vllm or slots; `steps`; with `room` one of
offloading_plays.py, without the gate), and answers each with what happened. It offers blocks
as vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py does: what a request hit is
not offered, what was offered is not offered again unless there was no room, and after a reset all
is. A block is named by its whole prefix: that of "abc" comes after that of "ab".
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from hostprep.cuda.gate import Gate
from hostprep.engines.vllm.offloading import GatedManager
from hostprep.engines.vllm.offloading_slots import SlotsManager
from tests.engines.offloading_plays import Play

_ROOM = 4096


def _key(prefix: str) -> Any:
    return make_offload_key(prefix.encode().rjust(16), 0)  # as short as vLLM's shortest hashes


class Request:
    """A request as the scheduler sees it."""

    def __init__(self, name: int, path: str) -> None:
        self.path = path
        self.context = ReqContext(req_id=str(name))
        self.computed = self.next_stored = 0
        self.is_finished = self.has_looked = False


class Round:
    """One engine's life."""

    def __init__(self, inner: str) -> None:
        self.inner: Any = (
            SlotsManager(_ROOM) if inner == "slots" else CPUOffloadingManager(num_chunks=_ROOM)
        )
        self.gate = Gate(1, on_degraded=lambda _: None)
        self.manager = GatedManager(self.inner, self.gate)
        self.requests: list[Request] = []
        self.jobs: list[tuple[Request, list[str]]] = []
        self.stored: list[str] = []
        self.orphans: list[str] = []
        self.answers: list[str] = []
        self.refused = 0

    def play(self, steps: list[Any]) -> dict[str, Any]:
        for step, *arguments in steps:
            getattr(self, f"_{step}")(*arguments)
        return {
            "stored": self.stored,
            "orphans": self.orphans,
            "answers": self.answers,
            "refused": self.refused,
            "state": self.gate.state,
            "pending": self.manager.has_pending_work(),
            "held": [path for path in self.stored if self._has(path)],
        }

    def _has(self, prefix: str) -> bool:
        context = ReqContext(req_id="look")
        return self.inner.lookup(_key(prefix), context) is not LookupResult.MISS

    def _open(self) -> None:
        self.gate.report(0, "Ready")

    def _fail(self) -> None:
        self.gate.report(0, "Failed", "out of memory")

    def _new(self, path: str) -> None:
        request = Request(len(self.requests), path)
        self.manager.on_new_request(request.context)
        self.requests.append(request)

    def _step(self, number: int, blocks: int) -> None:
        """Compute some blocks more of a request, which is looked up when it is first scheduled."""
        request = self._active(number)
        if request is None:
            return
        if not request.has_looked:
            self._look_up(request)
        request.computed = min(len(request.path), request.computed + blocks)
        offered = [request.path[: at + 1] for at in range(request.next_stored, request.computed)]
        if offered:
            self._offer(request, offered)

    def _look_up(self, request: Request) -> None:
        request.has_looked = True
        hits = 0
        for end in range(1, len(request.path) + 1):
            answer = self.manager.lookup(_key(request.path[:end]), request.context)
            self.answers.append(answer.name)
            if answer is not LookupResult.HIT:
                break
            hits = end
        if hits:
            keys = [_key(request.path[: end + 1]) for end in range(hits)]
            self.manager.prepare_load(keys, request.context)
            self.manager.complete_load(keys, request.context)
            request.computed = request.next_stored = hits

    def _offer(self, request: Request, offered: list[str]) -> None:
        before = {prefix for prefix in self.stored if self._has(prefix)}
        names = {_key(prefix): prefix for prefix in offered}
        output = self.manager.prepare_store(list(names), request.context)
        if output is None:  # what vLLM warns of, and tries again
            self.refused += 1
            return
        request.next_stored = request.computed
        accepted = [names[key] for key in output.keys_to_store]
        for prefix in accepted:
            if len(prefix) > 1 and prefix[:-1] not in before:
                self.orphans.append(prefix)
            before.add(prefix)
        self.stored += accepted
        if accepted:
            self.jobs.append((request, accepted))

    def _complete(self, number: int) -> None:
        if self.jobs:
            request, prefixes = self.jobs.pop(number % len(self.jobs))
            self.manager.complete_store([_key(prefix) for prefix in prefixes], request.context)

    def _finish(self, number: int) -> None:
        request = self._active(number)
        if request is not None:
            request.is_finished = True
            self.manager.on_request_finished(request.context)

    def _reset(self) -> None:
        self.manager.reset_cache()
        self.jobs.clear()
        for request in self.requests:
            request.next_stored = 0

    def _end(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def _active(self, number: int) -> Request | None:
        active = [request for request in self.requests if not request.is_finished]
        return active[number % len(active)] if active else None


def _answer(inner: str, steps: list[Any], **scene: Any) -> dict[str, Any]:
    try:
        return Play(inner, **scene).play(steps) if scene else Round(inner).play(steps)
    except Exception:
        return {"wrong": traceback.format_exc()}


def main() -> None:
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
