"""The agent's state folder on disks that refuse: said, and no reason to stop."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostprep.agent.desired import DesiredState, DesiredStateStore, read_saved, save
from hostprep.agent.instance import lock_state_dir
from hostprep.agent.settings import Settings
from hostprep.errors import BadInputError, FailedError
from hostprep.kube.logs import make_logger, set_up_logs
from tests.support.agent_values import desired_state_of, entry_of

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


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Give the next tests the root logger as it was: `set_up_logs` is for a whole process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _desired(count: int) -> DesiredState:
    return desired_state_of(*(entry_of(f"pool-{number}") for number in range(count)))


def _settings(disk: Path) -> Settings:
    return Settings(node_name="a", root=f"{disk}/root", state_dir=str(disk), allow_cgroup_v1=True)


def test_a_full_disk_is_said_once_and_what_was_saved_stays(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logs(style="json", level="info")
    store = DesiredStateStore(str(disk), make_logger("agent"))
    store.save(_desired(1))
    large = _desired(1000)
    for _ in range(3):
        store.save(large)

    assert capsys.readouterr().err.count("not_saved") == 1
    assert read_saved(str(disk)).has_same_content_as(_desired(1))  # type: ignore[union-attr]
    with pytest.raises(FailedError, match="--state-dir"):
        save(str(disk), large)


def test_it_is_saved_once_there_is_room_again(disk: Path) -> None:
    set_up_logs(style="json", level="error")
    store = DesiredStateStore(str(disk), make_logger("agent"))
    (disk / "filler").write_bytes(bytes(28 << 10))
    store.save(_desired(40))
    assert store.saved is None
    (disk / "filler").unlink()
    store.try_again()
    assert read_saved(str(disk)).has_same_content_as(_desired(40))  # type: ignore[union-attr]


@pytest.mark.parametrize("trouble", ["full", "read-only"])
@pytest.mark.parametrize("had_run", [False, True])
def test_one_agent_alone_starts_all_the_same(disk: Path, trouble: str, had_run: bool) -> None:
    settings = _settings(disk)
    if had_run:
        os.close(lock_state_dir(settings.state_dir))
    if trouble == "full":
        for number in range(4):
            try:
                (disk / f"filler-{number}").write_bytes(bytes(16 << 10))
            except OSError:
                break
    else:
        _run("mount", "-o", "remount,ro", str(disk))

    settings.check()
    first = lock_state_dir(settings.state_dir)
    with pytest.raises(BadInputError, match="another agent"):
        lock_state_dir(settings.state_dir)
    os.close(first)
    os.close(lock_state_dir(settings.state_dir))


def test_who_started_on_a_full_disk_keeps_its_place_once_there_is_room(disk: Path) -> None:
    settings = _settings(disk)
    fillers = [disk / f"filler-{number}" for number in range(4)]
    with contextlib.suppress(OSError):
        for filler in fillers:
            filler.touch()
    assert not fillers[-1].exists()
    settings.check()
    first = lock_state_dir(settings.state_dir)
    for filler in fillers:
        filler.unlink(missing_ok=True)
    with pytest.raises(BadInputError, match="another agent"):
        lock_state_dir(settings.state_dir)
    os.close(first)
    os.close(lock_state_dir(settings.state_dir))


def test_a_state_folder_that_cannot_be_made_is_bad_input(disk: Path) -> None:
    (disk / "file").write_text("")
    settings = Settings(
        node_name="a", root="/run/x", state_dir=f"{disk}/file/state", allow_cgroup_v1=True
    )
    with pytest.raises(BadInputError, match="--state-dir"):
        settings.check()
