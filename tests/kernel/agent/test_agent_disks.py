"""The agent's state folder on disks that refuse: said, and no reason to stop."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.agent.desired import Desire, read_saved, save
from hostprep.agent.saving import Saver
from hostprep.agent.settings import Settings
from hostprep.errors import BadInputError, FailedError
from hostprep.kube.logs import make_logger, set_up_logs
from tests.support.agent_values import desire_of, entry_of

pytestmark = pytest.mark.kernel


@pytest.fixture
def disk(machine: None, tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root: mounts")
    folder = tmp_path / "state"
    folder.mkdir()
    _run("mount", "-t", "tmpfs", "-o", "size=32k,nr_inodes=4", "test", str(folder))
    yield folder
    _run("umount", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _desire(count: int) -> Desire:
    return desire_of(*(entry_of(f"pool-{number}") for number in range(count)))


def _settings(disk: Path) -> Settings:
    return Settings(node_name="a", root=f"{disk}/root", state_dir=str(disk), allow_cgroup_v1=True)


def test_a_full_disk_is_said_once_and_what_was_saved_stays(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logs(style="json", level="info")
    saver = Saver(str(disk), make_logger("agent"))
    saver.keep(_desire(1))
    large = _desire(1000)
    for _ in range(3):
        saver.keep(large)

    assert capsys.readouterr().err.count("not_saved") == 1
    assert read_saved(str(disk)).says_the_same_as(_desire(1))  # type: ignore[union-attr]
    with pytest.raises(FailedError, match="--state-dir"):
        save(str(disk), large)


def test_it_is_saved_once_there_is_room_again(disk: Path) -> None:
    set_up_logs(style="json", level="error")
    saver = Saver(str(disk), make_logger("agent"))
    (disk / "filler").write_bytes(bytes(28 << 10))
    saver.keep(_desire(40))
    assert saver.saved is None
    (disk / "filler").unlink()
    saver.try_again()
    assert read_saved(str(disk)).says_the_same_as(_desire(40))  # type: ignore[union-attr]


@pytest.mark.parametrize("trouble", ["full", "read-only"])
@pytest.mark.parametrize("had_run", [False, True])
def test_one_agent_alone_starts_all_the_same(disk: Path, trouble: str, had_run: bool) -> None:
    settings = _settings(disk)
    if had_run:
        os.close(settings.lock())
    if trouble == "full":
        for number in range(4):
            try:
                (disk / f"filler-{number}").write_bytes(bytes(16 << 10))
            except OSError:
                break
    else:
        _run("mount", "-o", "remount,ro", str(disk))

    settings.check()
    first = settings.lock()
    with pytest.raises(BadInputError, match="another agent"):
        settings.lock()
    os.close(first)
    os.close(settings.lock())


def test_who_started_on_a_full_disk_keeps_its_place_once_there_is_room(disk: Path) -> None:
    settings = _settings(disk)
    fillers = [disk / f"filler-{number}" for number in range(4)]
    with contextlib.suppress(OSError):
        for filler in fillers:
            filler.touch()
    assert not fillers[-1].exists()
    settings.check()
    first = settings.lock()
    for filler in fillers:
        filler.unlink(missing_ok=True)
    with pytest.raises(BadInputError, match="another agent"):
        settings.lock()
    os.close(first)
    os.close(settings.lock())


def test_a_state_folder_that_cannot_be_made_is_bad_input(disk: Path) -> None:
    (disk / "file").write_text("")
    settings = Settings(
        node_name="a", root="/run/x", state_dir=f"{disk}/file/state", allow_cgroup_v1=True
    )
    with pytest.raises(BadInputError, match="--state-dir"):
        settings.check()
