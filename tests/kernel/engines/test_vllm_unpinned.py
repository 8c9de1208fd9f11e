"""A rank of vLLM that cannot register, and may copy all the same: with the stand-in driver."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostprep.backing import MIB
from hostprep.client.attach import Attachment
from hostprep.cuda.board import RankBoard, board_path
from hostprep.cuda.registration import register
from hostprep.engines.vllm.offloading_layout import Layout
from hostprep.engines.vllm.offloading_region import RankRegistration
from hostprep.engines.vllm.settings import FALLBACK, Settings
from hostprep.errors import NotReadyError
from testbed.processes import wait_for
from testbed.standin.children import Scene, in_child
from tests.kernel.cuda.parts import ONE_MIB

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]

_REGION = "hostprep.engines.vllm.offloading_region"
_LAYOUT = Layout(rows=8, row_bytes=MIB, slice_bytes=8 * MIB)


@contextmanager
def _rank(
    scene: Scene, *, grows: bool = False, deadline_s: float = 60.0
) -> Iterator[tuple[RankRegistration, str]]:
    """Yield a rank that has begun to register 8 MiB in 8 chunks, and the path of its board."""
    scene.context()
    memory = scene.attachment(8)
    path = board_path(memory)
    Path(path).parent.mkdir(parents=True)
    settings = Settings.read(
        {FALLBACK: "unpinned", "hostprep.deadline_s": deadline_s}, can_have_slots=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attachment, "lease_id", "a lease")
        patch.setattr(f"{_REGION}.register", functools.partial(register, policy=ONE_MIB))
        rank = RankRegistration(
            memory,
            _LAYOUT,
            settings,
            rank=0,
            world=1,
            slice_number=0,
            registers=True,
            grows=grows,
        )
        rank.poll()
        yield rank, path
    rank.close()


def _is_settled(path: str) -> bool:
    (seen,) = RankBoard.look(path).ranks
    return seen.slot.state in ("Ready", "Failed")


@in_child(fail="register:4:801")
def test_it_is_ready_with_all_rows_once_what_was_registered_is_taken_back(scene: Scene) -> None:
    with _rank(scene) as (rank, path):
        wait_for(lambda: _is_settled(path))
        assert scene.unregistered() == scene.registered()[::-1]
        (seen,) = RankBoard.look(path).ranks
        assert (seen.slot.state, seen.slot.done_bytes) == ("Ready", 0)
        assert "not registered" in seen.slot.reason
        assert "NOT_SUPPORTED" in seen.slot.reason
        assert (rank.rows, rank.holes) == (8, ())


@in_child(fail="register:4:801")
def test_what_is_in_use_by_then_stays_registered_and_the_rest_is_used_too(scene: Scene) -> None:
    with _rank(scene, grows=True) as (rank, path):
        wait_for(lambda: _is_settled(path))
        (seen,) = RankBoard.look(path).ranks
        assert (seen.slot.state, seen.slot.done_bytes) == ("Ready", 3 * MIB)
        assert scene.unregistered() == []
        assert rank.rows == 8
    assert scene.unregistered() == scene.registered()[::-1]


@in_child(fail="register:any:2")
def test_it_is_so_too_when_the_time_is_over(scene: Scene) -> None:
    with _rank(scene, grows=True, deadline_s=0.3) as (rank, path):
        wait_for(lambda: _is_settled(path))
        (seen,) = RankBoard.look(path).ranks
        assert seen.slot.state == "Ready"
        assert rank.rows == 8


@in_child(fail="register:4:801")
def test_but_not_where_a_page_is_bad(scene: Scene) -> None:
    def fails(*_: object) -> None:
        raise NotReadyError("a page of it is bad", reason="PoisonedPage")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{_REGION}.make_present", fails)
        with _rank(scene) as (rank, path):
            wait_for(lambda: _is_settled(path))
            (seen,) = RankBoard.look(path).ranks
            assert seen.slot.state == "Failed"
            assert "a page of it is bad" in seen.slot.reason
            assert rank.rows < 8
