"""Files that others may write: read within bounds, or not readable, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.client import sidecar, untrusted
from hostprep.client.owner import Owner, OwnerRecord
from hostprep.client.sidecar import read_members, read_sidecar
from hostprep.errors import BadInputError, NotReadableError
from hostprep.paths import PoolPaths

pytestmark = pytest.mark.unit

_TEXT = st.text(st.characters(codec=None, exclude_categories=()))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(_TEXT, inner),
    max_leaves=10,
)
_KEYS = ("lease_id", "pid", "start_ticks", "pid_namespace", "command", "claimed_at_s")


@pytest.fixture
def paths(tmp_path: Path) -> PoolPaths:
    paths = PoolPaths(str(tmp_path), "kv")
    os.makedirs(paths.state_of("r"))
    return paths


def _lease(**changes: object) -> bytes:
    document = {
        "lease_id": "1f",
        "pid": 1,
        "start_ticks": 2,
        "pid_namespace": 3,
        "command": "engine",
        "claimed_at_s": 4.5,
        "owner": None,
        "links": [],
    }
    return json.dumps(document | changes).encode()


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_not_readable(data: bytes) -> None:
    with contextlib.suppress(NotReadableError):
        untrusted.parse_object(data)


@given(st.dictionaries(st.sampled_from([*_KEYS, "owner", "links"]), _JSON))
def test_any_lease_is_read_as_what_it_promises_or_is_none(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, object]
) -> None:
    paths = PoolPaths(str(tmp_path_factory.mktemp("root")), "kv")
    os.makedirs(paths.state_of("r"))
    Path(paths.sidecar("r")).write_bytes(_lease(**changes))
    lease = read_sidecar(paths, "r")
    if lease is None:
        return
    texts = [lease.lease_id, lease.command, *lease.links]
    texts += [text for pair in lease.owner.identity for text in pair] if lease.owner else []
    for text in texts:
        assert "\0" not in text
        text.encode()
    assert 0 <= lease.claimed_at_s < 2**41
    json.dumps(lease.claimed_at_s, allow_nan=False)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff{}",
        b"[" * 200_000,
        _lease(pid=-1),
        _lease(pid=True),
        _lease(pid=1 << 64),
        _lease(pid="1"),
        _lease(lease_id="x" * 65),
        _lease(lease_id="\x1b[2J"),
        _lease(command="a\0b"),
        _lease(command="\ud800"),
        _lease(command="x" * 5000),
        _lease(claimed_at_s=-1),
        _lease(claimed_at_s=float("nan")),
        _lease(claimed_at_s=1e300),
        _lease().replace(b"4.5", b"1e999"),
        _lease().replace(b"4.5", b"9" * 5000),
        _lease(links="abc"),
        _lease() + b" " * untrusted.MAX_OBJECT_BYTES,
    ],
)
def test_a_lease_that_no_program_of_ours_wrote_is_none(paths: PoolPaths, data: bytes) -> None:
    Path(paths.sidecar("r")).write_bytes(_lease())
    assert read_sidecar(paths, "r") is not None
    Path(paths.sidecar("r")).write_bytes(data)
    assert read_sidecar(paths, "r") is None


def test_of_many_links_those_that_are_paths_are_kept(paths: PoolPaths) -> None:
    links = ["/a", "/b\0", "/\ud800", 7, None, *(f"/{n}" for n in range(100))]
    Path(paths.sidecar("r")).write_bytes(_lease(links=links))
    lease = read_sidecar(paths, "r")
    assert lease is not None
    assert lease.links[:3] == ("/a", "/0", "/1")
    assert len(lease.links) < 64


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)
        server.bind(path.name)


def _second_name(path: Path) -> None:
    path.with_name("other").write_bytes(b"{}")
    os.link(path.with_name("other"), path)


KINDS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "symbolic link": lambda path: path.symlink_to("/etc/passwd"),
    "hard links": _second_name,
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_a_plain_file_of_one_name_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "f"
    KINDS[kind](path)
    with pytest.raises(NotReadableError):
        untrusted.open_file(str(path))
    with pytest.raises(NotReadableError):
        untrusted.read_tail(str(path), 10)
    assert kind in (untrusted.wrong_kind(str(path)) or "")


def test_what_is_no_path_is_not_readable() -> None:
    for path in ("a\0b", "\ud800", "x" * 10_000):
        with pytest.raises(NotReadableError):
            untrusted.read_file(path, 10)
        assert untrusted.wrong_kind(path) is None


def test_a_missing_file_is_empty_and_a_large_one_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert untrusted.read_file(str(path), 10) == b""
    path.touch()
    assert untrusted.wrong_kind(str(path)) is None
    os.truncate(path, 1 << 40)
    with pytest.raises(NotReadableError):
        untrusted.read_file(str(path), 10)
    assert untrusted.read_tail(str(path), 10) == bytes(10)


@given(st.lists(st.tuples(st.sampled_from("+-"), st.integers(1, 4)), max_size=30))
def test_members_are_those_that_joined_more_often_than_they_left(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, int]]
) -> None:
    paths = PoolPaths(str(tmp_path_factory.mktemp("root")), "kv")
    os.makedirs(paths.state_of("r"))
    Path(paths.users_lock("r")).write_text(
        "".join(f"{sign} {pid} 7 9\nnonsense\n= {pid} 1 1\n" for sign, pid in lines)
    )
    expected: list[int] = []  # a leave without a join counts for nothing
    for sign, pid in lines:
        if sign == "+":
            expected.append(pid)
        elif pid in expected:
            expected.remove(pid)
    assert {member.pid for member in read_members(paths, "r")} == set(expected)


def test_of_too_many_members_the_newest_count(paths: PoolPaths) -> None:
    count = sidecar.MAX_MEMBERS_BYTES // 10
    with open(paths.users_lock("r"), "w", encoding="ascii") as file:
        file.writelines(f"+ {pid} 7 9\n" for pid in range(1, count + 1))
    members = read_members(paths, "r")
    assert len(members) == sidecar.MAX_MEMBERS
    assert members[-1].pid == count


def test_four_times_the_members_take_some_four_times_as_long(paths: PoolPaths) -> None:
    def reading_s(members: int) -> float:
        with open(paths.users_lock("r"), "w", encoding="ascii") as file:
            for sign in "+-":
                file.writelines(f"{sign} {pid} 7 9\n" for pid in range(members))
        took_s = []
        for _ in range(5):
            begin_s = time.process_time()
            assert read_members(paths, "r") == ()
            took_s.append(time.process_time() - begin_s)
        return min(took_s)

    assert reading_s(4_000) < 9 * reading_s(1_000)  # compared with each other: 16 times


def test_an_owners_identity_that_could_not_be_read_back_is_refused() -> None:
    token = "x" * 16
    for identity in ({"model": "x" * 40_000}, {"model": "\ud800"}, {"a\0": "b"}):
        with pytest.raises(BadInputError, match="identity"):
            Owner(token, identity)
    record = Owner(token, {"model": "m" * 4000}).record()
    assert OwnerRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


@given(_TEXT)
def test_what_is_printable_can_be_encoded_and_holds_no_control_character(text: str) -> None:
    shown = untrusted.printable(text)
    assert shown.isprintable()
    shown.encode()
    assert len(shown) == len(text)
