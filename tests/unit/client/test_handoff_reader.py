"""The handoff's reader trusts nothing: whatever the bytes, an answer or NotReadyError."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import Backing
from hostprep.client.handoff import (
    MAX_BYTES,
    SCHEMA,
    Handoff,
    Region,
    check_region,
    parse_handoff,
    read_handoff,
)
from hostprep.errors import BadInputError, HostprepError, NotReadyError
from hostprep.paths import PoolPaths

pytestmark = pytest.mark.unit

BOOT = "11111111-2222-3333-4444-555555555555"


def _region(**changes: Any) -> Region:
    region = Region(
        name="node0-0",
        path="mem/node0-0",
        st_dev=30,
        st_ino=7,
        size_bytes=1 << 21,
        backing=Backing.HUGETLB_2MI,
        page_bytes=1 << 21,
        placement="node:0",
        pinned=True,
    )
    return replace(region, **changes)


def _handoff(*regions: Region) -> Handoff:
    return Handoff("kv", "", 3, BOOT, "0.1.0", regions or (_region(),))


def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(_handoff().to_bytes())
    return document


def _schema() -> dict[str, Any]:
    text = (resources.files("hostprep.client") / "handoff_schema.json").read_text()
    schema: dict[str, Any] = json.loads(text)
    return schema


def test_what_is_written_is_read_back() -> None:
    handoff = _handoff(_region(), _region(name="node1-0", path="mem/node1-0", placement="node:1"))
    assert parse_handoff(handoff.to_bytes()) == handoff


def test_what_is_written_satisfies_the_shipped_schema() -> None:
    jsonschema.validate(_document(), _schema())


def test_unknown_members_are_let_pass() -> None:
    document = _document() | {"added_in_v1": 1}
    document["regions"][0]["added_in_v1"] = {"a": []}
    assert parse_handoff(json.dumps(document).encode()) == _handoff()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "hostprep.dev/handoff/v2"}, "v2"),
        ({"schema": None}, "schema"),
        ({"regions": None}, "regions"),
        ({"regions": [None]}, "no object"),
        ({"generation": -1}, "generation"),
        ({"generation": True}, "generation"),
        ({"generation": 1 << 70}, "generation"),
        ({"pool": ["kv"]}, "pool"),
        ({"pool": ""}, "pool name"),
        ({"pool": "../kv"}, "pool name"),
        ({"boot_id": "a\nb"}, "boot_id"),
    ],
)
def test_a_malformed_document_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(NotReadyError, match=words):
        parse_handoff(json.dumps(_document() | change).encode())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "../../etc/passwd"}, "leaves"),
        ({"path": "/etc/passwd"}, "leaves"),
        ({"path": "mem//node0-0"}, "leaves"),
        ({"path": "mem/./node0-0"}, "leaves"),
        ({"path": ""}, "leaves"),
        ({"name": "../x"}, "impossible name"),
        ({"name": "n" * 200}, "impossible name"),
        ({"size_bytes": 0}, "size_bytes"),
        ({"size_bytes": 1.5}, "size_bytes"),
        ({"size_bytes": (1 << 21) + 1}, "whole number of pages"),
        ({"page_bytes": 3}, "whole number of pages"),
        ({"backing": "HugeTLB4Mi"}, "unknown backing"),
        ({"placement": "node:-1"}, "places"),
        ({"placement": "moon"}, "places"),
        ({"pinned": 1}, "pinned"),
        ({"st_ino": "7"}, "st_ino"),
        ({"layout": 3}, "layout"),
        ({"attach": None}, "attach"),
        (
            {
                "attach": {
                    "register_chunk_bytes": 1,
                    "populate_read_threads": 0,
                    "skip_register": False,
                }
            },
            "populate_read_threads",
        ),
    ],
)
def test_a_malformed_region_is_refused(change: dict[str, Any], words: str) -> None:
    document = _document()
    document["regions"][0] |= change
    with pytest.raises(NotReadyError, match=words):
        parse_handoff(json.dumps(document).encode())


def test_two_regions_of_one_name_or_path_are_refused() -> None:
    with pytest.raises(NotReadyError, match="twice"):
        parse_handoff(_handoff(_region(), _region()).to_bytes())
    with pytest.raises(NotReadyError, match="same path"):
        parse_handoff(_handoff(_region(), _region(name="node0-1")).to_bytes())


def test_huge_deep_and_crowded_documents_are_refused_quickly() -> None:
    with pytest.raises(NotReadyError, match="larger than"):
        parse_handoff(b" " * (MAX_BYTES + 1))
    with pytest.raises(NotReadyError, match="not JSON"):
        parse_handoff(b"[" * 1_000_000)
    with pytest.raises(NotReadyError, match="1000000 regions"):
        parse_handoff(json.dumps(_document() | {"regions": [0] * 1_000_000}).encode())
    with pytest.raises(NotReadyError, match="not JSON"):
        parse_handoff(b'{"generation": ' + b"9" * 100_000 + b"}")


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(NotReadyError):
        parse_handoff(data)


@given(st.integers(0, 10_000))
def test_a_torn_file_is_refused(length: int) -> None:
    whole = _handoff().to_bytes().rstrip()
    with pytest.raises(NotReadyError):
        parse_handoff(whole[: length % len(whole)])


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(st.sampled_from(sorted(_document())), _json)
def test_any_value_in_any_member_is_read_or_refused(key: str, value: Any) -> None:
    try:
        handoff = parse_handoff(json.dumps(_document() | {key: value}).encode())
    except NotReadyError:
        return
    jsonschema.validate(json.loads(handoff.to_bytes()), _schema())


@given(st.sampled_from(sorted(_document()["regions"][0])), _json)
def test_any_value_in_any_member_of_a_region_is_read_or_refused(key: str, value: Any) -> None:
    document = _document()
    document["regions"][0][key] = value
    try:
        handoff = parse_handoff(json.dumps(document).encode())
    except NotReadyError:
        return
    region = handoff.regions[0]
    assert ".." not in region.path.split("/")
    assert not region.path.startswith("/")
    assert region.size_bytes % region.page_bytes == 0


@pytest.fixture
def paths(tmp_path: Path) -> PoolPaths:
    (tmp_path / "kv").mkdir()
    return PoolPaths(str(tmp_path), "kv")


def test_reading_checks_boot_and_pool(paths: PoolPaths) -> None:
    Path(paths.handoff).write_bytes(_handoff().to_bytes())
    assert read_handoff(paths, boot_id=BOOT) == _handoff()
    with pytest.raises(NotReadyError, match="another boot"):
        read_handoff(paths, boot_id="other")
    Path(paths.handoff).write_bytes(replace(_handoff(), pool="db").to_bytes())
    with pytest.raises(NotReadyError, match="for pool 'db'"):
        read_handoff(paths, boot_id=BOOT)


def test_a_handoff_that_is_no_plain_file_is_refused(paths: PoolPaths, tmp_path: Path) -> None:
    os.mkfifo(paths.handoff)
    with pytest.raises(NotReadyError, match="regular file"):
        read_handoff(paths, boot_id=BOOT)
    os.unlink(paths.handoff)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(_handoff().to_bytes())
    os.symlink(elsewhere, paths.handoff)
    with pytest.raises(NotReadyError, match="symbolic link"):
        read_handoff(paths, boot_id=BOOT)
    os.unlink(paths.handoff)
    os.mkdir(paths.handoff)
    with pytest.raises(NotReadyError):
        read_handoff(paths, boot_id=BOOT)


def test_a_root_or_pool_folder_that_is_a_link_is_refused(paths: PoolPaths, tmp_path: Path) -> None:
    Path(paths.handoff).write_bytes(_handoff().to_bytes())
    os.symlink(paths.root, tmp_path / "link")
    with pytest.raises(BadInputError, match="not a plain folder"):
        read_handoff(PoolPaths(f"{tmp_path}/link", "kv"), boot_id=BOOT)
    os.symlink("kv", tmp_path / "alias")
    with pytest.raises(NotReadyError, match="symbolic link"):
        read_handoff(PoolPaths(paths.root, "alias"), boot_id=BOOT)


def test_what_does_not_exist_is_not_prepared(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotReadyError) as caught:
            read_handoff(PoolPaths(str(root), "kv"), boot_id=BOOT)
        assert caught.value.reason == "NotPrepared"


@pytest.mark.parametrize("lie", ["st_ino", "st_dev", "size_bytes"])
def test_a_lying_identity_or_size_is_found(tmp_path: Path, lie: str) -> None:
    file = tmp_path / "region"
    file.write_bytes(bytes(1 << 21))
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        true = _region(st_dev=status.st_dev, st_ino=status.st_ino)
        check_region(true, opened.fileno())
        with pytest.raises(HostprepError):
            check_region(replace(true, **{lie: getattr(true, lie) * 2}), opened.fileno())


def test_a_sparse_file_is_not_resident(tmp_path: Path) -> None:
    file = tmp_path / "region"
    file.touch()
    os.truncate(file, 1 << 21)
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        with pytest.raises(NotReadyError, match="lacks 2097152 bytes"):
            check_region(_region(st_dev=status.st_dev, st_ino=status.st_ino), opened.fileno())


def test_the_schema_is_of_this_version() -> None:
    assert _schema()["properties"]["schema"]["const"] == SCHEMA
