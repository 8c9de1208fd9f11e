"""A turnstile's folder is everybody's to write to: users without rights, junk, links, views."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hostprep
from hostprep.cuda.turnstile import Turnstile
from hostprep.cuda.turnstile_files import make_turnstiles, remove_turnstiles
from hostprep.errors import BusyError
from hostprep.paths import TURNSTILE
from tests.kernel.cuda import taking_turns
from tests.kernel.cuda.users import as_user, become, expect
from tests.support.processes import forked

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.parallel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: users and mounts"),
]

CHECKOUT = Path(hostprep.__file__).parents[1]
WORKER = Path(taking_turns.__file__).with_name("taking_turns.py")
HANG_S = 30.0


@pytest.fixture
def root(memory_folder: Path) -> Path:
    memory_folder.chmod(0o755)
    return memory_folder


def take(root: Path, *, timeout_s: float = HANG_S) -> str | None:
    """Take a turn. Returns why that was without one, if it was; raises BusyError."""
    said: list[str] = []
    ours = Turnstile(str(root), patience_s=1e9, say=said.append)
    for _ in range(2):
        with ours.turn(timeout_s):
            pass
    assert len(said) <= 1, "says so once"
    return ours.without


def test_users_without_rights_share_it(root: Path) -> None:
    make_turnstiles(str(root))

    def hold(ready: Callable[[], None]) -> None:
        become(1000)
        turn = Turnstile(str(root)).turn()
        turn.__enter__()
        ready()
        import time

        time.sleep(600)

    def refused() -> None:
        with pytest.raises(BusyError):
            take(root, timeout_s=0.2)

    with forked(hold):
        as_user(1001, refused)
        refused()
    as_user(1001, lambda: expect((why := take(root)) is None, why))
    assert take(root) is None


def test_a_folder_made_by_one_user_serves_the_next(root: Path) -> None:
    (root / TURNSTILE).mkdir()
    (root / TURNSTILE).chmod(0o1777)
    as_user(1000, lambda: expect((why := take(root)) is None, why))
    as_user(1001, lambda: expect((why := take(root)) is None, why))
    assert oct(os.stat(root / TURNSTILE / "node").st_mode & 0o7777) == "0o1777"
    assert os.stat(root / TURNSTILE / "node" / "slot0").st_mode & 0o777 == 0o666


def test_another_users_dead_ticket_is_passed_over_though_it_cannot_be_removed(root: Path) -> None:
    make_turnstiles(str(root))

    def wait(ready: Callable[[], None]) -> None:
        become(1000)
        from hostprep.cuda import turnstile_files as tickets

        folder = os.open(root / TURNSTILE / "node", os.O_RDONLY)
        tickets.draw(folder)
        ready()

    with forked(wait):
        with pytest.raises(BusyError):
            take(root, timeout_s=0.2)
    assert len(list((root / TURNSTILE / "node").glob("0*"))) == 1
    as_user(1001, lambda: expect((why := take(root)) is None, why))
    assert len(list((root / TURNSTILE / "node").glob("0*"))) == 1
    assert take(root) is None
    assert not list((root / TURNSTILE / "node").glob("0*")), "root removes it"


def test_junk_is_ignored_and_left_alone(root: Path, tmp_path: Path) -> None:
    make_turnstiles(str(root))
    folder = root / TURNSTILE / "node"
    precious = tmp_path / "precious"
    precious.write_text("not yours")
    (folder / "000000000001").symlink_to(precious)
    (folder / "000000000002").mkdir()
    os.mkfifo(folder / "000000000003")
    (folder / "notes.txt").write_text("hello")
    (folder / "٣").write_text("a digit, and none of ours")
    (folder / ("9" * 60)).write_text("too long")
    (folder / ("9" * 30)).write_text("the last number that counts")
    as_user(1000, lambda: expect((why := take(root)) is None, why))
    assert take(root) is None
    assert precious.read_text() == "not yours"
    assert (folder / "000000000001").is_symlink()
    assert (folder / "000000000002").is_dir()
    assert (folder / "notes.txt").exists()


def test_a_link_for_a_folder_or_a_slot_is_not_followed(root: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (root / TURNSTILE).mkdir()
    (root / TURNSTILE).chmod(0o1777)
    as_user(1000, lambda: os.symlink(precious, root / TURNSTILE / "node"))
    assert take(root) is not None
    assert not list(precious.iterdir())
    assert oct(precious.stat().st_mode & 0o7777) == "0o700"
    remove_turnstiles(str(root))
    assert precious.is_dir()

    make_turnstiles(str(root))
    target = tmp_path / "file"
    target.write_text("mine")
    with target.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.unlink(root / TURNSTILE / "node" / "slot0")
        as_user(1000, lambda: os.symlink(target, root / TURNSTILE / "node" / "slot0"))
        assert take(root) is not None, "without turns, and not waiting for another's lock"


def test_a_pool_of_that_name_is_not_opened_to_everybody(root: Path) -> None:
    (root / TURNSTILE).mkdir(mode=0o755)
    (root / TURNSTILE / "claim.lock").touch()
    why = take(root)
    assert why is not None
    assert "is a pool" in why
    assert oct((root / TURNSTILE).stat().st_mode & 0o7777) == "0o755"


def test_without_a_folder_it_goes_on(root: Path) -> None:
    as_user(1000, lambda: expect("there is no" in str(take(root)), take(root)))
    # Nor does root, in a container that sees nothing but its pool: it would be alone there.
    assert "there is no" in str(take(root))
    assert not (root / TURNSTILE).exists()
    why = take(root / "nothing")
    assert why is not None
    assert "does not exist" in why


def test_through_a_read_only_mount_it_goes_on(root: Path) -> None:
    make_turnstiles(str(root))
    code = (
        "from hostprep.cuda.turnstile import Turnstile\n"
        "said = []\n"
        f"ours = Turnstile({str(root)!r}, say=said.append)\n"
        "for _ in range(3):\n"
        "    with ours.turn(): pass\n"
        "print(said)\n"
        "assert len(said) == 1 and 'read-only' in said[0].lower()\n"
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec",
         'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; exec "$2" -c "$3"',
         "sh", str(root), sys.executable, code],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


VIEW = """
mkdir -p "$1/view/kv" "$1/view/turnstile"
mount --bind "$1/kv" "$1/view/kv"
test "$4" = alone || mount --bind "$1/turnstile" "$1/view/turnstile"
test "$4" = mounted || rmdir "$1/view/turnstile"
exec "$2" -c "$3" "$1/view"
"""


@pytest.mark.parametrize(("mounts", "told"), [("mounted", "TurnTimeout"), ("alone", "there is no")])
def test_a_container_of_one_pool_takes_turns_by_a_mount_of_the_turnstile(
    root: Path, mounts: str, told: str
) -> None:
    """The two host paths of docs/register.md: while somebody outside has its turn, it waits."""
    make_turnstiles(str(root))
    (root / "kv").mkdir()
    code = (
        "import sys\n"
        "from hostprep.errors import BusyError\n"
        "from hostprep.cuda.turnstile import Turnstile\n"
        "ours = Turnstile(sys.argv[1], patience_s=1e9, say=print)\n"
        "try:\n"
        "    with ours.turn(0.2): pass\n"
        "except BusyError as error: print(error.reason)\n"
    )
    with Turnstile(str(root)).turn():
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-ec", VIEW, "sh", root, sys.executable, code, mounts],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert told in done.stdout


def test_processes_of_other_pid_namespaces_share_it(root: Path) -> None:
    make_turnstiles(str(root))
    log = root / "log"
    command = [sys.executable, str(WORKER), str(root), str(log), "20", "0.002", "1", "none", ""]
    started = [
        subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", *command],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        )
        for _ in range(3)
    ]
    for process in started:
        assert process.wait(HANG_S) == 0
    text = log.read_text()
    assert "overlap" not in text
    assert "say:" not in text
    assert text.count("begin /1-") == 60, "each is process 1 of its own namespace"
