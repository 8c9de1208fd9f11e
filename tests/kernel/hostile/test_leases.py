"""What an engine writes beside its regions costs its own pool only."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hostprep
from hostprep.client import scrub
from hostprep.client.sidecar import MAX_MEMBERS, read_members, read_sidecar
from hostprep.errors import BusyError
from hostprep.linux.locks import try_lock
from hostprep.linux.processes import HOST_PID_NAMESPACE, current_process
from tests.kernel.hostile.attackers import ATTACKED, ENGINE, REGION, Pools
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel


def forge(path: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Replace a JSON file by a changed one, as whoever may write its folder."""
    document = json.loads(Path(path).read_text())
    change(document)
    os.unlink(path)
    Path(path).write_text(json.dumps(document))
    os.chmod(path, 0o666)


@pytest.mark.parametrize(
    "link", ["/tmp/a\0b", "/tmp/\ud800", "/" + "x/" * 5000, "", "relative", "/"]
)
def test_links_that_are_no_paths_stop_neither_scrubbing_nor_release(
    pools: Pools, link: str
) -> None:
    pools.dirty(ATTACKED)
    sidecar = pools.attacked.sidecar(REGION)
    ENGINE.does(lambda: forge(sidecar, lambda lease: lease.update(links=[link])))
    pools.bystander_works()
    assert os.path.exists(pools.attacked.clean_mark(REGION)), "the odd lease kept it dirty"

    pools.dirty(ATTACKED)
    ENGINE.does(lambda: forge(sidecar, lambda lease: lease.update(links=[link])))
    done = run_hostprep("release", ATTACKED, "--force", "--root", pools.root)
    assert done.returncode == 0, done.stderr


def _add_lines(path: str, *lines: str) -> None:
    with open(path, "a", encoding="ascii") as file:
        file.write("".join(f"{line}\n" for line in lines))


def _init_line() -> str:
    with open("/proc/1/stat", encoding="ascii") as file:
        start_ticks = file.read().rpartition(")")[2].split()[19]
    return f"+ 1 {start_ticks} {HOST_PID_NAMESPACE}"


def test_hundreds_of_thousands_of_joins_and_leaves_cost_no_time(pools: Pools) -> None:
    """Each of them was compared with all before: 3,000 held root for minutes."""
    pools.dirty(ATTACKED)
    users = pools.attacked.users_lock(REGION)
    lines = [f"+ {pid} {pid + 5} 4026531836" for pid in range(5_000_000, 5_010_000)]
    lines += [line.replace("+", "-") for line in lines]
    ENGINE.does(lambda: _add_lines(users, *lines * 3))
    start_s = time.monotonic()
    assert len(read_members(pools.attacked, REGION)) == 0
    ENGINE.does(lambda: _add_lines(users, *lines[:10_000]))
    assert len(read_members(pools.attacked, REGION)) == MAX_MEMBERS
    assert time.monotonic() - start_s < 2
    pools.bystander_works()
    assert os.path.exists(pools.attacked.clean_mark(REGION))
    assert os.stat(users).st_size == 0, "it stays as large as it was made"


def test_a_users_file_of_a_terabyte_keeps_no_region_and_no_memory(pools: Pools) -> None:
    pools.dirty(ATTACKED)
    users = pools.attacked.users_lock(REGION)
    ENGINE.does(lambda: os.truncate(users, 1 << 40))
    pools.bystander_works()
    assert os.path.exists(pools.attacked.clean_mark(REGION))


def test_processes_are_looked_up_before_the_claim_lock_is_taken(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools.dirty(ATTACKED)
    users = pools.attacked.users_lock(REGION)
    ENGINE.does(lambda: _add_lines(users, "+ 5000000 1 4026531836"))
    locked: list[bool] = []
    monkeypatch.setattr(
        scrub, "first_alive", lambda _: locked.append(_is_locked(pools.attacked.claim_lock))
    )
    pools.reconcile()
    pools.dirty(ATTACKED)  # a claimer that scrubs
    assert locked
    assert not any(locked)


def _is_locked(path: str) -> bool:
    with open(path, "rb") as file:
        return not try_lock(file.fileno(), exclusive=True)


def test_a_line_that_names_the_hosts_first_process_keeps_no_region(pools: Pools) -> None:
    pools.dirty(ATTACKED)
    users, line = pools.attacked.users_lock(REGION), _init_line()
    ENGINE.does(lambda: _add_lines(users, line))
    pools.reconcile()
    assert os.path.exists(pools.attacked.clean_mark(REGION))


def test_a_living_process_that_joined_keeps_its_region(pools: Pools) -> None:
    pools.dirty(ATTACKED)
    users = pools.attacked.users_lock(REGION)
    me = current_process()
    with ENGINE.keeps(lambda: _add_lines(users, _line_of_this_process())):
        assert read_members(pools.attacked, REGION)
        assert read_members(pools.attacked, REGION)[0].pid != me.pid
        pools.reconcile()
        assert not os.path.exists(pools.attacked.clean_mark(REGION))
    pools.reconcile()
    assert os.path.exists(pools.attacked.clean_mark(REGION))


def _line_of_this_process() -> str:
    me = current_process()
    return f"+ {me.pid} {me.start_ticks} {me.namespace}"


def _socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        folder, name = os.path.split(path)
        os.chdir(folder)  # the name of a socket has a short limit
        server.bind(name)


def _link(path: str) -> None:
    Path(f"{path}2").touch()
    os.link(f"{path}2", path)


def _terabyte(path: str) -> None:
    Path(path).touch()
    os.truncate(path, 1 << 40)


PLANTS: dict[str, Callable[[str], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": _socket,
    "a folder": lambda path: os.makedirs(f"{path}/below/it"),
    "a link": lambda path: os.symlink("/etc/passwd", path),
    "a link to itself": lambda path: os.symlink(path, path),
    "another name of a file": _link,
    "a terabyte": _terabyte,
    "nesting": lambda path: Path(path).write_text("[" * 200_000),
    "a number": lambda path: Path(path).write_text('{"lease_id": "x", "pid": 1e999}'),
    "digits": lambda path: Path(path).write_text('{"st_ino": ' + "9" * 200_000 + "}"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_whatever_lies_in_place_of_a_regions_files_is_made_again(pools: Pools, plant: str) -> None:
    pools.dirty(ATTACKED)
    paths = pools.attacked
    files = (paths.users_lock(REGION), paths.sidecar(REGION), paths.clean_mark(REGION))

    def replace() -> None:
        for path in files:
            if os.path.lexists(path):
                os.unlink(path)
            PLANTS[plant](path)

    before = os.stat("/etc/passwd")
    ENGINE.does(replace)
    pools.bystander_works_in_process()
    assert is_plain(paths.clean_mark(REGION)), "the region is stuck"
    assert is_plain(paths.users_lock(REGION))
    with hostprep.attach(ATTACKED, region=REGION, root=pools.root):
        assert is_plain(paths.sidecar(REGION))
        assert read_sidecar(paths, REGION) is not None
    assert os.stat("/etc/passwd").st_mtime == before.st_mtime
    pools.node.release([ATTACKED])


def is_plain(path: str) -> bool:
    """Tell whether a plain file with one name lies there."""
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size < 4096


def _dead_tickets(folder: str, count: int) -> None:
    for number in range(count):
        os.close(os.open(f"{folder}/{number:012d}", os.O_CREAT | os.O_EXCL, 0o600))


@pytest.mark.timeout(200)
def test_twenty_thousand_dead_tickets_are_removed_a_part_at_a_time(pools: Pools) -> None:
    tickets = pools.attacked.tickets
    ENGINE.does(lambda: _dead_tickets(tickets, 20_000))
    start_s = time.monotonic()
    with hostprep.attach(ATTACKED, root=pools.root):
        pass
    assert time.monotonic() - start_s < 5
    left = len(os.listdir(tickets))
    assert 15_000 <= left < 20_000
    pools.bystander_works_in_process()


def _hold_ticket(path: str, text: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o660)
    os.write(fd, text.encode())
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


@pytest.mark.parametrize("number", ["999999999999", "9" * 18, "9" * 200, "-1", "²"])
@pytest.mark.parametrize("text", ["", "[1e999]", '{"a": 1}', '["\\ud800"]', "null"])
def test_a_living_ticket_of_an_absurd_number_ends_no_claim(
    pools: Pools, number: str, text: str
) -> None:
    path = f"{pools.attacked.tickets}/{number}"
    with ENGINE.keeps(lambda: _hold_ticket(path, text)):
        # The last possible number is a place in the queue like any other; the rest are none.
        waits = pytest.raises(BusyError, match="waiting")
        with waits if number == "999999999999" else contextlib.nullcontext():
            hostprep.attach(ATTACKED, root=pools.root, wait_timeout_s=0.2).close()
        pools.bystander_works_in_process()
    hostprep.attach(ATTACKED, root=pools.root).close()
