"""`hostprep status` shows the gates of all engines on the node."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hostprep.client.sidecar import NO_PROCESS, new_sidecar, write_sidecar
from hostprep.cuda.board import RankBoard
from hostprep.cuda.board_view import BoardReader
from hostprep.cuda.gate import Gate
from hostprep.linux.locks import try_lock
from hostprep.paths import PoolPaths
from tests.kernel.cuda.ranks import a_rank
from tests.support.processes import hostprep, wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]

HANG_S = 30.0


@pytest.fixture
def paths(memory_folder: Path) -> PoolPaths:
    """A pool of two small regions, as status finds them: nothing was prepared."""
    paths = PoolPaths(str(memory_folder), "kv")
    for region in ("node0-0", "node0-1"):
        os.makedirs(paths.state_of(region))
        os.makedirs(paths.mem, exist_ok=True)
        Path(paths.mem, region).write_bytes(bytes(4096))
        Path(paths.users_lock(region)).touch()
    Path(paths.claim_lock).touch()
    return paths


def gates(paths: PoolPaths) -> list[dict[str, Any]]:
    done = hostprep("status", "--root", paths.root, "-o", "json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)["gates"]
    return found


def table(paths: PoolPaths) -> str:
    done = hostprep("status", "--root", paths.root)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_where_no_engine_is_there_are_none(paths: PoolPaths) -> None:
    assert gates(paths) == []
    assert "GATE" not in table(paths)


def test_the_gates_of_two_engines(paths: PoolPaths) -> None:
    first, second = paths.board("node0-0"), paths.board("node0-1")
    with (
        a_rank(first, "one", 2, 0, "ready"),
        a_rank(first, "one", 2, 1),
        a_rank(second, "two", 2, 1, "fail"),
    ):
        wait_until(
            lambda: (
                RankBoard.look(first).ranks[0].slot.state == "Ready"
                and RankBoard.look(second).ranks[0].slot.state == "Failed"
            ),
            timeout_s=HANG_S,
        )
        one, two = gates(paths)
        assert (one["region"], one["state"], one["world"]) == ("node0-0", "Closed", 2)
        assert [rank["state"] for rank in one["ranks"]] == ["Ready", "Initializing"]
        assert (two["region"], two["state"]) == ("node0-1", "Degraded")
        assert two["why"] == "rank 1 failed: no memory to pin"
        text = table(paths)
        assert "1 of 2 ready" in text
        assert "rank 1 failed" in text
    assert gates(paths) == [], "both runs are over"


def test_what_the_engines_gate_announced_goes_first(paths: PoolPaths) -> None:
    board = paths.board("node0-0")
    with a_rank(board, "run", 4, 0, "ready"):
        reader = BoardReader(board, generation="run")
        gate = Gate(4, reader, deadline_s=HANG_S)
        for rank in (1, 2, 3):
            gate.report(rank, "Ready")  # of other nodes
        assert gate.wait(HANG_S)
        (shown,) = gates(paths)
        assert (shown["state"], shown["why"]) == ("Open", "")
        assert len(shown["ranks"]) == 1


def test_a_lease_all_of_whose_ranks_ended_is_shown(paths: PoolPaths) -> None:
    sidecar = replace(new_sidecar("lease1", None), holder=NO_PROCESS)
    write_sidecar(paths, "node0-0", sidecar, gid=os.getgid())
    with a_rank(paths.board("node0-0"), "lease1", 2, 0):
        pass
    assert gates(paths) == []
    fd = os.open(f"{paths.mem}/node0-0", os.O_RDWR)
    assert try_lock(fd, exclusive=True)
    (shown,) = gates(paths)
    os.close(fd)
    assert (shown["state"], shown["why"]) == ("Degraded", "rank 0 ended before it was ready")


def test_junk_in_a_boards_place_is_told_and_ends_nothing(paths: PoolPaths) -> None:
    Path(paths.board("node0-0")).write_bytes(b"HPBOARD\0junk")
    os.symlink("/etc/passwd", paths.board("node0-1"))
    first, second = gates(paths)
    assert first["state"] == second["state"] == "Unknown"
    assert "cut short" in first["why"]
    assert "Unknown" in table(paths)


def test_a_reason_of_control_characters_stays_out_of_the_terminal(paths: PoolPaths) -> None:
    board = RankBoard.open(paths.board("node0-0"), generation="run", world=1, rank=0)
    board.failed("\x1b[2Jgone [bold]")
    text = table(paths)
    board.close()
    assert "\x1b" not in text
    assert "[bold]" in text
