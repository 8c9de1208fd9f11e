"""When kept blocks are recovered, voided or waited for; runs in vLLM's interpreter.

Prints one JSON object, by scene: what is wrong, or an empty text. Argument: a pool's root.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

from hostprep.cuda.gate import Gate
from hostprep.engines.vllm import keeping
from hostprep.engines.vllm.identity import Identity
from hostprep.engines.vllm.keeping import KEY_BYTES, Keeper
from hostprep.engines.vllm.offloading import GatedManager
from hostprep.engines.vllm.offloading_slots import SlotsManager, slots_layout
from hostprep.paths import PoolPaths
from hostprep.slots import Request
from hostprep.slots.directory import MAX_IDENTITY_BYTES, Directory

_CHUNKS = 8
_KEYS = [bytes([number]) * KEY_BYTES for number in range(4)]
_PATHS = PoolPaths(sys.argv[1], "kv")
_ENGINE = Identity({"engine": "vLLM"})
_RANKS = Identity({"ranks.shape": "[2]"})
_WEIGHTS = Identity({"weights": "sha256:1"})

SCENES: list[Callable[[], None]] = []


def scene(function: Callable[[], None]) -> Callable[[], None]:
    SCENES.append(function)
    return function


class Engine:
    """A scheduler's half, with what would be found out put in by hand."""

    def __init__(
        self, memory: bytearray, engine: Identity = _ENGINE, *, has_events: bool = False
    ) -> None:
        self.keeper = Keeper(
            "chat",
            Directory(memoryview(memory), slots_layout(_CHUNKS, 64), key_bytes=KEY_BYTES),
            engine=engine,
            paths=_PATHS,
            region="r0",
            chunk_bytes=64,
            deadline_s=600,
        )
        self.manager = SlotsManager(
            _CHUNKS, chunk_bytes=64, keeper=self.keeper, has_events=has_events
        )
        self.keeper._is_attached = True
        self.keeper._recover = self.manager.recover
        self.keeper.add_ranks(_RANKS)

    def decided(self, weights: Identity = _WEIGHTS) -> Engine:
        self.keeper._weights = weights
        self.keeper.poll()
        return self

    def store(self, keep: bool = True) -> None:
        request = Request("a", 5, _KEYS, computed_tokens=1, first_block=1, keep=keep)
        (claim,) = self.manager.pool.claim_batch([request]).claims
        claim.commit()
        claim.release()

    @property
    def cached(self) -> int:
        return self.manager.pool.usage()[0].cached


def _memory() -> bytearray:
    return bytearray(Directory.size_bytes_for(_CHUNKS, KEY_BYTES))


def _stored() -> bytearray:
    memory = _memory()
    Engine(memory).decided().store()
    return memory


def _report() -> dict[str, Any]:
    with open(_PATHS.warm_report("r0"), encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


@scene
def the_same_engine_finds_its_blocks() -> None:
    engine = Engine(_stored()).decided()
    assert engine.keeper.is_open
    assert engine.cached == len(_KEYS)
    assert _report()["recovered_blocks"] == _report()["kept_blocks"] == len(_KEYS)


@scene
def loads_of_recovered_chunks_are_counted_and_of_others_are_not() -> None:
    engine = Engine(_stored()).decided()
    manager, context = engine.manager, ReqContext("b")
    new = bytes([9]) * KEY_BYTES
    manager.prepare_store([new], context)
    manager.complete_store([new], context)
    for _ in range(2):
        manager.prepare_load([*_KEYS[:2], new], context)
        manager.complete_load([*_KEYS[:2], new], context)
    assert engine.keeper.take_loaded_bytes() == 2 * 2 * 64
    assert engine.keeper.take_loaded_bytes() == 0
    engine.keeper.close()
    assert (_report()["loaded_blocks"], _report()["kept_blocks"]) == (4, len(_KEYS))
    evicted: list[bytes] = []
    for number in range(20, 20 + 2 * _CHUNKS):
        key = bytes([number]) * KEY_BYTES
        evicted += manager.prepare_store([key], context).evicted_keys
        manager.complete_store([key], context)
    again = next(key for key in _KEYS if key in evicted)
    manager.prepare_store([again], context)
    manager.complete_store([again], context)
    manager.prepare_load([again], context)
    assert engine.keeper.take_loaded_bytes() == 0


@scene
def the_report_goes_on_without_requests() -> None:
    keeping.REPORT_EVERY_S = 0.01
    engine = Engine(_memory()).decided()
    assert _report()["kept_blocks"] == 0
    decided_s = _report()["at_s"]
    engine.store()
    until_s = time.monotonic() + 30
    while _report()["kept_blocks"] != len(_KEYS) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert (_report()["kept_blocks"], _report()["at_s"]) == (len(_KEYS), decided_s)
    engine.keeper.stop("they are about to change")
    assert (_report()["kept_blocks"], list(_report()["refused"])) == (0, ["weights"])
    engine.keeper.close()


@scene
def while_the_weights_are_not_known_blocks_that_may_be_ours_are_waited_for() -> None:
    engine = Engine(_stored())
    engine.keeper.poll()
    assert not engine.keeper.is_open
    assert engine.decided().cached == len(_KEYS)


@scene
def other_weights_start_empty_and_are_named() -> None:
    memory = _stored()
    engine = Engine(memory).decided(Identity({"weights": "sha256:2"}))
    assert engine.keeper.is_open
    assert engine.cached == 0
    assert _report()["refused"] == {"weights": ["sha256:1", "sha256:2"]}
    assert Engine(memory).decided().cached == 0, "nor does the first engine find them again"


@scene
def what_differs_elsewhere_is_not_waited_for() -> None:
    memory = _stored()
    engine = Engine(memory, Identity({"engine": "another"}))
    engine.keeper.poll()
    assert engine.keeper.is_open
    engine.store()
    engine.decided()
    assert Engine(memory, Identity({"engine": "another"})).decided().cached == 0, (
        "stored before it was known what it was of"
    )


@scene
def what_is_unknown_keeps_nothing() -> None:
    memory = _stored()
    engine = Engine(memory).decided(Identity({}, {"weights": "dummy"}))
    assert engine.keeper.is_open
    engine.store()
    assert Engine(memory).decided().cached == 0


@scene
def ranks_that_said_nothing_keep_nothing() -> None:
    memory = _stored()
    engine = Engine(memory)
    engine.keeper._ranks = None
    engine.decided()
    assert engine.keeper.is_open
    assert engine.cached == 0


@scene
def new_weights_void_what_is_kept_for_good() -> None:
    memory = _stored()
    engine = Engine(memory).decided()
    engine.keeper.stop("they are about to change")
    engine.store()
    engine.manager.reset_cache()
    engine.store()
    assert Engine(memory).decided().cached == 0


@scene
def a_reset_voids_and_goes_on_keeping() -> None:
    memory = _stored()
    engine = Engine(memory).decided()
    engine.manager.reset_cache()
    assert Engine(bytearray(memory)).decided().cached == 0
    engine.store()
    assert Engine(memory).decided().cached == len(_KEYS)


@scene
def an_identity_without_room_keeps_nothing_and_the_engine_goes_on() -> None:
    engine = Engine(_memory(), Identity({"engine": "x" * MAX_IDENTITY_BYTES})).decided()
    assert engine.keeper.is_open
    engine.store()
    assert engine.cached == len(_KEYS)


@scene
def another_layout_voids_what_its_chunks_overwrite() -> None:
    """One engine, then one with larger chunks, then the first one again."""
    memory = bytearray(Directory.size_bytes_for(_CHUNKS, KEY_BYTES) + 4096)
    region = memoryview(memory)
    few = Directory.size_bytes_for(_CHUNKS // 2, KEY_BYTES)
    many = Directory.size_bytes_for(_CHUNKS, KEY_BYTES)
    first = Directory(region[-many:], slots_layout(_CHUNKS, 64), key_bytes=KEY_BYTES)
    first.reset({"engine": "one"})
    other = Directory(region[-few:], slots_layout(_CHUNKS // 2, 128), key_bytes=KEY_BYTES)
    assert other.identity is None
    assert "another layout" in (other.problem or "")
    other.reset({"engine": "another"})
    again = Directory(region[-many:], slots_layout(_CHUNKS, 64), key_bytes=KEY_BYTES)
    assert again.identity is None


@scene
def what_a_dead_engine_was_writing_is_left_alone_whatever_differs() -> None:
    memory = _stored()
    engine = Engine(memory).decided()
    request = Request(
        "b", 3, [b"x" * KEY_BYTES, b"y" * KEY_BYTES], computed_tokens=1, first_block=1
    )
    engine.manager.pool.claim_batch([request])
    after = Engine(memory).decided(Identity({"weights": "sha256:2"}))
    assert after.manager.pool.usage()[0].free == _CHUNKS - 2


@scene
def a_reset_before_it_is_decided_keeps_from_then_on() -> None:
    memory = _stored()
    engine = Engine(memory)
    engine.keeper.poll()
    engine.manager.reset_cache()
    engine.decided().store()
    assert Engine(memory).decided().cached == len(_KEYS)


def _gated(memory: bytearray, weights: Identity = _WEIGHTS) -> tuple[Gate, Engine, GatedManager]:
    engine, gate = Engine(memory, has_events=True), Gate(1)
    gated = GatedManager(engine.manager, gate, engine.keeper)
    engine.keeper._weights = weights
    for _ in range(3):
        gated.on_schedule_end(ScheduleEndContext(new_req_ids=set(), preempted_req_ids=set()))
    return gate, engine, gated


@scene
def while_the_gate_is_closed_what_is_kept_is_neither_used_nor_changed() -> None:
    memory = _stored()
    before = bytes(memory)
    gate, engine, gated = _gated(memory)
    asked = ReqContext("a")
    assert gated.lookup(_KEYS[0], asked) == LookupResult.MISS
    assert not gated.prepare_store([b"z" * KEY_BYTES], asked).keys_to_store
    assert not list(gated.take_events()), "announced, and no lookup would find it"
    assert bytes(memory) == before
    assert engine.cached == len(_KEYS), "found in the first steps, which nobody waits for"
    gate.report(0, "Ready")
    assert gated.lookup(_KEYS[0], asked) == LookupResult.MISS, "a request stays where it began"
    assert gated.lookup(_KEYS[0], ReqContext("b")) == LookupResult.HIT
    (announced,) = gated.take_events()
    assert set(announced.keys) == set(_KEYS)


@scene
def an_engine_whose_gate_never_opens_leaves_what_is_kept_whatever_differs() -> None:
    for weights in (Identity({"weights": "sha256:2"}), Identity({}, {"weights": "dummy"})):
        memory = _stored()
        gate, engine, gated = _gated(memory, weights)
        assert not engine.keeper.is_open
        assert Engine(bytearray(memory)).decided().cached == len(_KEYS)
        gate.report(0, "Ready")
        assert gated.lookup(_KEYS[0], ReqContext("b")) == LookupResult.MISS
        assert engine.keeper.is_open
        assert Engine(memory).decided().cached == 0


@scene
def weights_that_change_while_the_gate_is_closed_void_what_is_kept() -> None:
    memory = _stored()
    _, engine, _ = _gated(memory)
    engine.keeper.stop("they are about to change")
    assert Engine(memory).decided().cached == 0


@scene
def weights_that_are_never_known_open_the_tier_in_the_end() -> None:
    engine = Engine(_stored())
    engine.keeper._until_s = 0.0
    engine.keeper.poll()
    assert engine.keeper.is_open
    assert engine.cached == 0


@scene
def a_report_that_cannot_be_written_ends_nothing() -> None:
    engine = Engine(_stored())
    engine.keeper._region = "not-there"
    assert engine.decided().cached == len(_KEYS)


@scene
def a_request_with_an_adapter_or_media_is_not_kept() -> None:
    class Plain:
        request_id = "a"
        lora_request = None
        mm_features: tuple[object, ...] = ()
        prompt_embeds = None

    keeper = Engine(_memory()).decided().keeper
    keeper.add_request(Plain())
    assert keeper.may_keep("a")
    for name, value in (("lora_request", 1), ("mm_features", (1,)), ("prompt_embeds", 0)):
        odd = Plain()
        setattr(odd, name, value)
        keeper.add_request(odd)
        assert not keeper.may_keep("a"), name
    keeper.finished("a")
    assert not keeper.may_keep("a")


def main() -> None:
    keeping._seed = lambda: Identity({"hash.seed": "00"})
    os.makedirs(_PATHS.state_of("r0"), exist_ok=True)
    wrong = {}
    for each in SCENES:
        try:
            each()
            wrong[each.__name__] = ""
        except Exception:
            wrong[each.__name__] = traceback.format_exc()
    print(json.dumps(wrong), flush=True)


if __name__ == "__main__":
    main()
