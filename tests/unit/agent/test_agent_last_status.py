"""What the agent leaves on the node for `hostprep status`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.agent.last_status import FILE_NAME, LastStatus, read_last_status
from hostprep.api.node_resource import NodeStatus, Phase, PoolStatus

pytestmark = pytest.mark.unit

BLOCKED = PoolStatus(
    name="kv", phase=Phase.BLOCKED, reason="ResizeBlocked", message="waits", blocked=("node0-0",)
)
STATUS = NodeStatus(boot_id="b", summary="kv blocked", pools=(BLOCKED,))


def test_phases_are_read_again_in_the_same_boot_alone(tmp_path: Path) -> None:
    LastStatus(str(tmp_path)).save(STATUS)

    said = read_last_status(str(tmp_path), boot_id="b")

    assert said is not None
    assert said.pools == (BLOCKED,)
    assert read_last_status(str(tmp_path), boot_id="another") is None
    assert os.stat(tmp_path / FILE_NAME).st_mode & 0o777 == 0o600


def test_it_is_written_only_when_what_people_wait_for_has_changed(tmp_path: Path) -> None:
    last = LastStatus(str(tmp_path))
    last.save(STATUS)
    first = os.stat(tmp_path / FILE_NAME).st_ino
    last.save(replace(STATUS, pools=(replace(BLOCKED, ready_bytes=5, progress_percent=20),)))
    assert os.stat(tmp_path / FILE_NAME).st_ino == first
    last.save(replace(STATUS, pools=(replace(BLOCKED, phase=Phase.RESIZING),)))
    said = read_last_status(str(tmp_path), boot_id="b")
    assert said is not None
    assert said.pools[0].phase is Phase.RESIZING


def test_without_an_instruction_nothing_is_left(tmp_path: Path) -> None:
    last = LastStatus(str(tmp_path))
    last.save(STATUS)
    last.forget()
    assert os.listdir(tmp_path) == []
    last.save(STATUS)
    assert read_last_status(str(tmp_path), boot_id="b") is not None


def test_a_folder_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    last = LastStatus(str(tmp_path / "gone"))
    last.save(STATUS)
    last.forget()
    assert read_last_status(str(tmp_path / "gone"), boot_id="b") is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"pools": 5}', '{"pools": [{"phase": "New"}]}'])
def test_a_damaged_file_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert read_last_status(str(tmp_path), boot_id="b") is None
