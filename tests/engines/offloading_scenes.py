"""The plugin's spec as vLLM makes it in the scheduler and in each rank, without an engine around.

Arguments: the root of a pool `kv`, the folder of a model. One lease a scene, in the variables of
`hostprep exec`. Prints a line of JSON at the end: each scene's name, and what went wrong in it.
"""

from __future__ import annotations

import functools
import json
import logging
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.base import LookupResult, OffloadingManager, ReqContext
from vllm.v1.kv_offload.cpu import gpu_worker

from hostprep.engines.vllm import offloading_compat
from hostprep.engines.vllm.offloading_layout import row_bytes_of
from hostprep.engines.vllm.offloading_region import FreeMemory
from hostprep.engines.vllm.offloading_worker import HostprepWorker
from tests.engines.offloading_copies import (
    PAGES,
    PER_CHUNK,
    OnGpu,
    caches_of,
    check_rows_apart,
    check_vllms_handler,
    copy_batch,
    copy_beyond_the_mark,
    copy_both_ways,
    finish,
    job,
    stand_in_for_cuda,
)
from tests.engines.offloading_slots_scenes import SLOTS_SCENES
from tests.engines.offloading_world import (
    CHUNK,
    HANG_S,
    OURS,
    SAID,
    Listener,
    board_state,
    leased,
    platform,
    refusal,
    spec_of,
    wait_for,
)

COMPAT: Any = offloading_compat
SCENES: list[Callable[[], None]] = []
ROW = row_bytes_of(CHUNK)


def scene(function: Callable[[], None]) -> Callable[[], None]:
    SCENES.append(function)
    return function


def warnings() -> list[str]:
    return [text for level, text in SAID if level == "WARNING"]


@scene
def memcpy_copies_land_in_each_ranks_slice() -> None:
    with leased():
        copy_both_ways(is_cuda=False)


@scene
def ranks_and_scheduler_agree_and_the_gate_opens_when_all_were_polled() -> None:
    with platform("cpu"), leased() as memory:
        scheduler = spec_of()
        manager = scheduler.get_manager()
        assert scheduler.get_manager() is manager
        ranks = [spec_of(rank) for rank in range(2)]
        slice_bytes = memory.size_bytes // 2
        assert {spec.num_chunks for spec in (scheduler, *ranks)} == {slice_bytes // ROW}
        workers = [
            spec.get_worker(caches_of(rank, kind=torch.Tensor)) for rank, spec in enumerate(ranks)
        ]
        assert board_state(memory) == ["Joined", "Joined"]
        assert workers[0].get_finished() == []
        assert board_state(memory) == ["Ready", "Joined"]
        assert not manager.gate.is_open
        assert workers[1].get_finished() == []
        assert manager.gate.wait(HANG_S)
        wait_for(lambda: len(SAID) == 1, "nothing was said")
        assert SAID[0][0] == "INFO", SAID
        for worker in workers:
            worker.shutdown()
        manager.shutdown()


@scene
def a_rank_that_cannot_register_leaves_the_rest_serving_and_it_is_said_once() -> None:
    """There is no driver here: the one rank that is to register fails, in its background."""
    with platform("cpu"), leased() as memory:
        manager = spec_of().get_manager()
        good = spec_of(0).get_worker(caches_of(0, kind=torch.Tensor))
        bad = spec_of(1, **{"hostprep.register": "always"})
        bad = bad.get_worker(caches_of(1, kind=torch.Tensor))
        for worker in (good, bad):
            assert worker.get_finished() == []
        assert not manager.gate.wait(HANG_S)
        wait_for(lambda: len(warnings()) == 1, "nothing was said")
        (words,) = warnings()
        assert "serving from GPU memory alone" in words
        assert "rank 1 failed" in words
        assert board_state(memory) == ["Ready", "Failed"]
        context = ReqContext(req_id="late")
        manager.on_new_request(context)
        assert manager.lookup(b"key" + bytes(4), context) is LookupResult.MISS
        for worker in (good, bad):
            worker.shutdown()
        manager.shutdown()
        assert len(warnings()) == 1, SAID


@scene
def a_rank_that_cannot_register_goes_on_unpinned_where_that_is_allowed() -> None:
    """As above; the rank copies all the same, and the gate opens for both."""
    unpinned = {"hostprep.fallback": "unpinned"}
    for mode in ("background", "sync"):
        SAID.clear()
        with platform("cpu"), leased() as memory:
            manager = spec_of(**unpinned).get_manager()
            good = spec_of(0, **unpinned).get_worker(caches_of(0, kind=torch.Tensor))
            bad = spec_of(1, **unpinned, **{"hostprep.register": "always", "hostprep.mode": mode})
            bad = bad.get_worker(caches_of(1, kind=torch.Tensor))
            for worker in (good, bad):
                assert worker.get_finished() == []
            assert manager.gate.wait(HANG_S)
            assert board_state(memory) == ["Ready", "Ready"]
            assert bad._registration.rows == memory.size_bytes // 2 // ROW
            gpu, cpu = job([0], 0, [bad._registration.rows - 1])
            assert bad.submit_store(1, gpu, cpu)
            finish(bad, 1)
            (words,) = warnings()
            assert "rank 1 copies" in words
            assert "not registered" in words
            for worker in (good, bad):
                worker.shutdown()
            manager.shutdown()


@scene
def ranks_on_several_nodes_leave_it_serving_and_it_is_said_once() -> None:
    real, OURS.nodes_of_world = OURS.nodes_of_world, lambda: 2
    try:
        with platform("cpu"), leased():
            manager = spec_of().get_manager()
            worker = spec_of(0).get_worker(caches_of(0, kind=torch.Tensor))
            assert not manager.gate.wait(HANG_S)
            wait_for(lambda: len(SAID) == 1, "nothing was said")
            assert "on 2 nodes" in SAID[0][1]
            worker.shutdown()
            manager.shutdown()
    finally:
        OURS.nodes_of_world = real


@scene
def synchronously_it_fails_as_engines_do_today() -> None:
    sync = {"hostprep.register": "always", "hostprep.mode": "sync"}
    with platform("cpu"), leased():
        spec = spec_of(0, 1, **sync)
        refusal(lambda: spec.get_worker(caches_of(0, kind=torch.Tensor)), "cuda")


@scene
def a_second_engine_on_the_same_region_is_refused() -> None:
    with platform("cpu"), leased():
        first = spec_of(0, 1).get_worker(caches_of(0, kind=torch.Tensor))
        second = spec_of(0, 1)
        refusal(lambda: second.get_worker(caches_of(0, kind=torch.Tensor)), "rank 0", "lives")
        first.shutdown()


@scene
def ranks_with_one_copy_share_one_slice_where_vllm_has_them_share() -> None:
    with leased() as memory:
        with platform("cuda"):
            assert spec_of(1, mla=True).num_chunks == memory.size_bytes // ROW
        with platform("cpu"):
            assert spec_of(1, mla=True).num_chunks == memory.size_bytes // 2 // ROW


@scene
def the_size_asked_for_is_a_limit() -> None:
    with platform("cpu"), leased() as memory:
        assert spec_of(0, 1, cpu_bytes_to_use=10 * ROW - 1).num_chunks == 9
        wanted = memory.size_bytes + 1
        refusal(
            lambda: spec_of(cpu_bytes_to_use=wanted),
            f"{wanted} bytes",
            f"{memory.size_bytes} bytes",
        )
        refusal(lambda: spec_of(cpu_bytes_to_use=CHUNK), "one chunk takes", f"{ROW} bytes")


@scene
def what_cannot_work_is_refused_before_memory_is_looked_for() -> None:
    with platform("xpu"):
        refusal(spec_of, "an accelerator", "--engine vllm")
    with platform("cpu"):
        refusal(lambda: spec_of(**{"hostprep.pol": "kv"}), "hostprep.pol", "known are")
        refusal(spec_of, "no prepared memory", "hostprep exec")
        refusal(lambda: spec_of(**{"hostprep.pool": "kv"}), "hostprep exec kv")


@scene
def another_release_is_a_warning_once() -> None:
    real, COMPAT.vllm.__version__ = COMPAT.vllm.__version__, "9.9.9"
    try:
        for _ in range(2):
            offloading_compat.warn_if_untested()
    finally:
        COMPAT.vllm.__version__ = real
    assert [level for level, text in SAID if "9.9.9" in text] == ["WARNING"]


@scene
def whatever_this_release_asks_a_manager_reaches_vllms_own() -> None:
    asked: list[str] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return lambda *_: None

    manager = offloading_compat.Forwarding(Recorder())
    names = [name for name in vars(OffloadingManager) if not name.startswith("_")]
    for name in names:
        member = getattr(manager, name)
        if not isinstance(vars(OffloadingManager)[name], property):
            member("some", "arguments")
    assert asked == names
    assert len(names) > 12


@scene
def what_is_not_registered_is_not_touched() -> None:
    with leased():
        copy_beyond_the_mark()


@scene
def a_worker_that_does_not_check_is_found() -> None:
    """The mutant."""
    real: Any = HostprepWorker._check
    HostprepWorker._check = lambda *_: None  # type: ignore[method-assign]
    try:
        with leased():
            copy_beyond_the_mark()
    except AssertionError as found:
        assert "were written" in str(found)  # noqa: PT017 - it is not pytest that runs it
    else:
        raise AssertionError("rows that are not registered were copied to, and nothing was noticed")
    finally:
        HostprepWorker._check = real  # type: ignore[method-assign]


@scene
def vllms_own_copies_land_in_each_ranks_slice() -> None:
    """The first one of those that come last: what it stands in for stays so."""
    stand_in_for_cuda()
    with leased():
        copy_both_ways(is_cuda=True)


@scene
def vllms_own_handler_copies_block_by_block_and_nothing_as_it_is_made() -> None:
    check_vllms_handler()


@scene
def a_vllm_that_merges_or_calibrates_is_noticed() -> None:
    """The mutants."""
    vllm: Any = gpu_worker
    own = vllm.SingleDirectionOffloadingHandler

    class Merging(gpu_worker.SingleDirectionOffloadingHandler):  # type: ignore[misc]
        def _fill_direct_ops(self, *arguments: Any, **named: Any) -> tuple[int, int]:
            at = named["op_idx"]
            end, size_bytes = super()._fill_direct_ops(*arguments, **named)
            named["all_sizes"][at] += named["all_sizes"][at + 1]
            named["all_sizes"][at + 1] = 0
            return end, size_bytes

    class Calibrating(gpu_worker.SingleDirectionOffloadingHandler):  # type: ignore[misc]
        def __init__(self, **named: Any) -> None:
            super().__init__(**named)
            torch.empty(16)

    try:
        for mutant, words in ((Merging, "one copy of several"), (Calibrating, "as it is made")):
            vllm.SingleDirectionOffloadingHandler = mutant
            try:
                check_vllms_handler()
            except AssertionError as found:
                assert words in str(found)  # noqa: PT017
            else:
                raise AssertionError(f"{mutant} was not noticed")
    finally:
        vllm.SingleDirectionOffloadingHandler = own


@scene
def a_vllm_that_merges_copies_makes_none_of_two_rows() -> None:
    with leased():
        check_rows_apart()


@scene
def memory_that_may_stay_unpinned_is_read_by_no_kernel() -> None:
    vllm: Any = gpu_worker
    vllm.HAS_TRITON, vllm.swap_blocks_batch = True, copy_batch
    vllm.triton = SimpleNamespace(next_power_of_2=lambda size: 1 << (size - 1).bit_length())
    try:
        for fallback, uses_kernels in (("gpu-only", True), ("unpinned", False)):
            with platform("cuda"), leased():
                spec = spec_of(0, 1, **{"hostprep.fallback": fallback})
                worker = spec.get_worker(caches_of(0, kind=OnGpu))
                chosen = [handler._swap_blocks_batch for handler in worker._handlers]
                assert (chosen[0], chosen[1] is not chosen[0]) == (copy_batch, uses_kernels)
                worker.shutdown()
    finally:
        vllm.HAS_TRITON = False


@scene
def it_registers_before_warm_up_where_nothing_is_captured_and_there_is_room() -> None:
    """There is no driver here: a rank that begins has failed."""
    much, little = FreeMemory(40 << 30, 80 << 30), FreeMemory(4 << 30, 80 << 30)
    real = OURS.free_memory, OURS.captures_graphs
    try:
        for memory, captures, words, state in (
            (much, False, "before warm-up", "Failed"),
            (little, False, "with the first step, after warm-up: page tables", "Joined"),
            (much, True, "with the first step, after warm-up: CUDA graphs", "Joined"),
        ):
            SAID.clear()
            OURS.free_memory, OURS.captures_graphs = (
                functools.partial(lambda found: found, each) for each in (memory, captures)
            )
            with platform("cuda"), leased() as region:
                worker = spec_of(0, 1).get_worker(caches_of(0, kind=OnGpu))
                wait_for(functools.partial(_is, region, state), "it is in another state")
                assert [words in text for _, text in SAID] == [True]
                assert worker.get_finished() == []
                wait_for(functools.partial(_is, region, "Failed"), "the first poll began nothing")
                worker.shutdown()
    finally:
        OURS.free_memory, OURS.captures_graphs = real


def _is(memory: Any, state: str) -> bool:
    return board_state(memory) == [state]


@scene
def rows_side_by_side_would_be_copied_as_one() -> None:
    """The mutant."""
    try:
        with leased():
            check_rows_apart(row_bytes=PAGES[0] * PER_CHUNK)
    except AssertionError as found:
        assert "one copy of rows" in str(found)  # noqa: PT017
    else:
        raise AssertionError("it was not noticed")


def main() -> None:
    offloading_compat.LOG.addHandler(Listener())
    offloading_compat.LOG.setLevel(logging.INFO)
    outcome = {}
    for play in (*SCENES, *SLOTS_SCENES):  # in this order: whole engines configure logging
        SAID.clear()
        try:
            play()
        except BaseException:
            outcome[play.__name__] = traceback.format_exc()
        else:
            outcome[play.__name__] = ""
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
