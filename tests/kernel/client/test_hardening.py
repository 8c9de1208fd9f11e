"""What a review found, kept from coming back: crashes at bad instants, and bad neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import hostprep
from hostprep.backing import MIB
from hostprep.client.handoff import read_handoff
from hostprep.errors import BadInputError, FailedError, NotReadyError
from hostprep.linux.locks import has_no_writer
from hostprep.node.apply import hugepages
from hostprep.node.apply.service import Node
from hostprep.node.facts import LedgerEntry
from hostprep.node.ledger import LedgerWriter, read_ledger
from hostprep.paths import PoolPaths
from testbed.machine import POOL, huge_pages_total, pool_of
from tests.support.processes import forked, wait_until
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

MINE = hostprep.Owner("a-secret-of-the-engine", {"model": "m"})
OTHER = hostprep.Owner("another-engines-secret", {"model": "m"})


class _Killed(BaseException):
    """Stands for a kill: nothing that handles errors may run into it."""


def _die(*_: object, **__: object) -> None:
    raise _Killed


def test_killed_in_a_scrub_an_owner_is_not_handed_anothers_bytes_as_its_own(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, owner=OTHER, root=node.root) as memory:
        memory.buffer[:6] = b"secret"
    with monkeypatch.context() as patch:
        patch.setattr("hostprep.client.scrub.scrub_file", _die)
        with pytest.raises(_Killed):
            hostprep.attach(POOL, owner=MINE, root=node.root)

    with hostprep.attach(POOL, owner=MINE, root=node.root) as memory:
        assert not memory.contents_kept
        assert memory.buffer[:6].tobytes() == bytes(6)


def test_prepare_killed_in_a_scrub_gives_nobody_half_of_its_bytes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, root=node.root) as memory:
        memory.buffer[:6] = b"secret"
    with monkeypatch.context() as patch:
        patch.setattr("hostprep.node.apply.regions.scrub_file", _die)
        with pytest.raises(_Killed):
            node.prepare([pool_of()])
    with hostprep.attach(POOL, owner=MINE, root=node.root) as memory:
        assert not memory.contents_kept
        assert memory.buffer[:6].tobytes() == bytes(6)


def test_folders_that_are_no_pools_are_neither_shown_nor_released_nor_adopted(
    node: Node, root: Path
) -> None:
    node.prepare([pool_of()])
    precious = root / "alice" / "thesis"
    precious.parent.mkdir()
    precious.write_text("years")
    with pytest.raises(NotReadyError, match="no pool alice"):
        node.release(["alice"], force=True)
    with pytest.raises(BadInputError, match="is no pool"):
        node.prepare([pool_of(name="alice")])
    assert "alice" not in run_hostprep("status", "--root", node.root).stdout
    assert precious.read_text() == "years"


def test_a_release_does_not_delete_files_that_are_not_ours(node: Node, root: Path) -> None:
    node.prepare([pool_of()])
    foreign = root / POOL / "notes.txt"
    foreign.write_text("mine")
    with pytest.raises(FailedError, match="not ours"):
        node.release([POOL])
    assert foreign.read_text() == "mine"
    foreign.unlink()
    node.release([POOL])


@pytest.mark.parametrize("spelling", ["//{}", "{}/", "link"])
def test_roots_by_other_spellings_are_the_same_root(
    node: Node, tmp_path: Path, spelling: str
) -> None:
    parent, name = os.path.split(node.root)
    if spelling == "link":
        (tmp_path / "link").symlink_to(parent)
        other = f"{tmp_path}/link/{name}"
    else:
        other = spelling.format(node.root)
    assert run_hostprep("prepare", "--name", POOL, "--size", "8Mi", "--root", other).returncode == 0
    assert run_hostprep("attach", "--pool", POOL, "--root", other).returncode == 0
    assert run_hostprep("release", POOL, "--root", other).returncode == 0
    assert not os.path.exists(node.root)


def test_a_release_killed_between_unmount_and_rmdir_converges(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare([pool_of()])
    with monkeypatch.context() as patch:
        patch.setattr("hostprep.node.apply.folder.os.rmdir", _die)
        with pytest.raises(_Killed):
            node.release([POOL])
    assert os.path.isdir(f"{node.root}/{POOL}/mem")
    node.release([POOL])
    assert not os.path.exists(node.root)


def test_a_writer_that_comes_while_we_look_does_not_end_us(tmp_path: Path) -> None:
    """It breaks our read lease, which signals: by SIGIO, and fatally, were it not for F_SETSIG."""
    file = tmp_path / "region"
    file.write_bytes(bytes(4096))
    code = (
        "import os, sys\n"
        "from hostprep.linux.locks import has_no_writer\n"
        f"fd = os.open({str(file)!r}, os.O_RDONLY)\n"
        "print('go', flush=True)\n"
        "for _ in range(20000): has_no_writer(fd)\n"
    )
    watcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert watcher.stdout is not None
    watcher.stdout.readline()
    while watcher.poll() is None:
        with file.open("r+b"):
            pass
    assert watcher.returncode == 0


def test_has_no_writer_sees_writers(tmp_path: Path) -> None:
    file = tmp_path / "region"
    file.write_bytes(bytes(16))
    with file.open("rb") as reader:
        assert has_no_writer(reader.fileno())
        with file.open("r+b"):
            assert not has_no_writer(reader.fileno())


def test_a_refused_write_of_huge_pages_is_not_counted_as_ours(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.prepare([pool_of()])
    paths = PoolPaths(node.root, POOL)
    ledger = read_ledger(paths)
    assert ledger is not None

    def refuse(*_: object) -> None:
        raise FailedError("refused")

    monkeypatch.setattr(hugepages, "_write", refuse)
    with pytest.raises(FailedError):
        hugepages.add_pages(LedgerWriter(paths, ledger), LedgerEntry(0, 2 * MIB, 4))
    after = read_ledger(paths)
    assert after is not None
    assert after.pending is None
    assert after.taken == ()
    assert huge_pages_total() == 0 or after.taken == ledger.taken


def test_one_bad_region_costs_itself_only(node: Node) -> None:
    node.prepare([pool_of(regions=2)])
    os.truncate(f"{node.root}/{POOL}/mem/node0-0", 4096)
    for _ in range(3):
        with hostprep.attach(POOL, root=node.root) as memory:
            assert memory.region.name == "node0-1"


def test_a_forked_child_neither_unmaps_nor_signs_off_for_its_parent(node: Node) -> None:
    node.prepare([pool_of()])
    memory = hostprep.attach(POOL, root=node.root)

    def close_too(ready: object) -> None:
        import mmap

        here = mmap.mmap(-1, memory.size_bytes)  # may well land in the hole
        here[:1] = b"x"
        memory.close()
        assert here[:1] == b"x"
        os.close(memory.fd)
        assert callable(ready)
        ready()

    with forked(close_too):
        status = run_hostprep("status", "-o", "json", "--root", node.root).stdout
        assert f'"pid": {os.getpid()}' in status
    memory.buffer[:1] = b"y"
    memory.close()


def test_an_object_that_only_remembers_the_buffer_keeps_the_memory(node: Node) -> None:
    """torch.frombuffer keeps the memoryview and releases its hold on the buffer."""
    node.prepare([pool_of()])
    memory = hostprep.attach(POOL, root=node.root)
    remembered = memory.buffer
    memory.close()
    assert remembered[:4].tobytes() == bytes(4)
    assert "Leased" in run_hostprep("status", "--root", node.root).stdout
    del remembered
    hostprep.attach(POOL, root=node.root).close()


def test_a_prepare_that_waits_for_a_release_goes_on_when_the_root_is_gone(node: Node) -> None:
    node.prepare([pool_of()])
    results: list[int] = []

    def prepare() -> None:
        command = ("prepare", "--name", POOL, "--size", "8Mi", "--root", node.root)
        results.append(run_hostprep(*command).returncode)

    threads = [threading.Thread(target=prepare) for _ in range(2)]
    for thread in threads:
        thread.start()
    run_hostprep("release", POOL, "--root", node.root)
    for thread in threads:
        thread.join()
    assert results == [0, 0]


def test_a_changed_group_reaches_what_is_there(node: Node) -> None:
    node.prepare([pool_of(gid=1111)])
    node.prepare([pool_of(gid=2222, mode=0o600)])
    paths = PoolPaths(node.root, POOL)
    for path in (f"{paths.folder}/mem/node0-0", paths.users_lock("node0-0"), paths.handoff):
        assert os.stat(path).st_gid == 2222
    assert os.stat(f"{paths.folder}/mem/node0-0").st_mode & 0o777 == 0o600
    assert read_handoff(paths).generation == 2


def test_what_the_group_can_plant_stops_nobody(node: Node) -> None:
    node.prepare([pool_of(regions=2, gid=1111)])
    paths = PoolPaths(node.root, POOL)
    os.unlink(paths.users_lock("node0-0"))
    os.mkfifo(paths.users_lock("node0-0"))
    os.mkfifo(f"{paths.tickets}/000000000001")
    Path(f"{paths.tickets}/²").touch()
    os.unlink(paths.clean_mark("node0-1"))
    os.mkdir(paths.clean_mark("node0-1"))
    Path(paths.sidecar("node0-1")).write_text('{"lease_id": "x", "pid": 1e999}')
    with open(paths.users_lock("node0-1"), "a", encoding="ascii") as file:
        file.write("+ " + "9" * 5000 + " 1 1\n")

    assert run_hostprep("status", "--root", node.root).returncode == 0
    hostprep.attach(POOL, root=node.root).close()
    node.prepare([pool_of(regions=2, gid=1111)])
    for memory in hostprep.attach_many(POOL, count=2, root=node.root):
        memory.close()
    node.release([POOL])
    assert not os.path.exists(node.root)


def test_a_root_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(BadInputError, match="written by other users"):
        Node(str(root)).prepare([pool_of()])
    assert list(root.iterdir()) == []


def test_a_command_starts_with_the_usual_signals(node: Node) -> None:
    """Python ignores SIGPIPE, and an ignored signal stays ignored over exec."""
    node.prepare([pool_of()])
    command = ("grep", "SigIgn", "/proc/self/status")
    done = run_hostprep("exec", "--pool", POOL, "--root", node.root, "--", *command)
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == plain.stdout


def test_a_holders_command_line_is_shown_as_it_is(node: Node) -> None:
    """Not as markup, and not as escape codes for the administrator's terminal."""
    node.prepare([pool_of()])
    hold = ("tail", "-F", "[/dev/shm]", "\x1b[31m")  # waits for such files to come
    command = ("exec", "--pool", POOL, "--root", node.root, "--", *hold)
    holder = subprocess.Popen(
        [sys.executable, "-m", "hostprep", *command], stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: "[/dev/shm]" in run_hostprep("status", "--root", node.root).stdout)
        assert "\x1b" not in run_hostprep("status", "--root", node.root).stdout
    finally:
        holder.kill()
        holder.wait()


def test_verify_goes_on_past_a_pool_without_a_handoff(node: Node) -> None:
    node.prepare([pool_of(), pool_of(name="other")])
    os.unlink(PoolPaths(node.root, POOL).handoff)
    done = run_hostprep("verify", "--root", node.root)
    assert done.returncode == 1
    assert "is not published" in done.stdout
    assert "ok" in done.stdout
