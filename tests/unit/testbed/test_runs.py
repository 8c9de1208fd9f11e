"""What a killed testbed left is removed; what is not surely its own is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.cache import builder_lock, cache_folder, install
from testbed.processes import MARK
from testbed.runs import Runs, carries_mark, choose_base, is_run_folder

pytestmark = pytest.mark.unit
_NAME = "hostprep-testbed-0123abcd"
_BEGIN_AND_DIE = """
import os, subprocess, sys
from pathlib import Path
from testbed.runs import Runs
run = Runs(Path(sys.argv[1])).begin()
marked = {**os.environ, "HOSTPREP_TESTBED": run.name}
child = subprocess.Popen(["sleep", "600"], stdout=-3, stderr=-3, env=marked)
print(run.name, run.folder, child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_belongs_to_a_run_by_its_whole_mark() -> None:
    assert carries_mark(f"PATH=/bin\0{MARK}={_NAME}\0A=b\0".encode(), _NAME)
    assert not carries_mark(f"{MARK}={_NAME}e\0".encode(), _NAME)
    assert not carries_mark(f"X{MARK}={_NAME}\0".encode(), _NAME)
    assert not carries_mark(b"", _NAME)


@pytest.mark.parametrize(
    "folder", ["/", "", "/dev/shm", "/home/a", f"{_NAME}", f"/a/../{_NAME}", f"/tmp/{_NAME}/x"]
)
def test_a_folder_of_another_name_is_never_removed(folder: str) -> None:
    assert not is_run_folder(folder, _NAME)
    assert is_run_folder(f"/dev/shm/{_NAME}", _NAME)
    assert not is_run_folder("/home/someone", "someone")


def test_memory_is_chosen_when_there_is_room_and_the_path_is_short() -> None:
    room = 4 << 30
    assert choose_base([("/dev/shm", room), ("/var/tmp", room)]) == "/dev/shm"
    assert choose_base([("/dev/shm", 64 << 20), ("/var/tmp", room)]) == "/var/tmp"
    assert choose_base([("/very/" + "long/" * 20, room)]) == "/tmp"


def test_the_next_start_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN_AND_DIE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    name, folder, pid = done.stdout.split()
    assert os.path.isdir(folder)
    assert os.path.isdir(f"/proc/{pid}")
    assert Runs(tmp_path).sweep() == [name]
    assert not os.path.exists(folder)
    assert not os.path.isdir(f"/proc/{pid}") or "Z" in Path(f"/proc/{pid}/stat").read_text()
    assert Runs(tmp_path).sweep() == []


def test_a_live_run_is_left_alone(tmp_path: Path) -> None:
    run = Runs(tmp_path).begin()
    try:
        (run.folder / "data").touch()
        other = Runs(tmp_path).begin()
        assert (run.folder / "data").exists()
        assert Runs(tmp_path).alive() == sorted([run.name, other.name])
        other.release()
    finally:
        run.release()
    assert not run.folder.exists()
    assert Runs(tmp_path).alive() == []


def test_a_record_that_names_a_strange_folder_removes_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / _NAME).write_text(str(precious))
    assert Runs(tmp_path / "runs").sweep() == [_NAME]
    assert precious.exists()


def test_a_program_is_in_the_cache_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), install(tmp_path, "tool-1") as folder:
        (folder / str(1 // 0)).touch()
    assert list(tmp_path.iterdir()) == []
    with install(tmp_path, "tool-1") as folder:
        (folder / "tool").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["tool-1", "tool"]


def test_a_second_builder_waits_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    script = (
        "import sys, time\nfrom pathlib import Path\n"
        "from testbed.cache import builder_lock\n"
        "with builder_lock(Path(sys.argv[1]), print):\n"
        "    print('held', flush=True)\n    time.sleep(1)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with builder_lock(tmp_path, said.append):
            pass
    assert len(said) == 1
    assert "another process builds" in said[0]


def test_an_unfinished_build_is_removed_by_the_next_builder(tmp_path: Path) -> None:
    (tmp_path / ".building-tool-1").mkdir(parents=True)
    (tmp_path / "tool-0").mkdir()
    with builder_lock(tmp_path, print):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["builder.lock", "tool-0"]


def test_the_cache_is_where_users_expect_it() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/hostprep/testbed")
    assert cache_folder({}) == Path("~/.cache/hostprep/testbed").expanduser()
