"""`hostprep purge` forgets what is kept; `hostprep status` shows it; neither believes an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import hostprep
from hostprep.client.kept import read_warm_report
from hostprep.client.sidecar import read_sidecar
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel
CHAT = hostprep.Owner("a-secret-of-the-engine", name="chat")
CODE = hostprep.Owner("a-secret-of-the-engine", name="code")


def _keep(node: Node, region: str, owner: hostprep.Owner) -> None:
    with hostprep.attach(POOL, region=region, owner=owner, root=node.root) as memory:
        memory.buffer[:4] = b"kept"


def _purge(node: Node, *options: str) -> tuple[int, dict[str, Any]]:
    done = run_hostprep("purge", POOL, "--root", node.root, "-o", "json", *options)
    return done.returncode, json.loads(done.stdout)


def _kept(node: Node) -> dict[str, Any]:
    shown = run_hostprep("status", POOL, "--root", node.root, "-o", "json").stdout
    return {each["name"]: each["kept"] for each in json.loads(shown)["pools"][0]["regions"]}


def test_purge_forgets_one_name_and_zeroes_it(node: Node) -> None:
    node.prepare([pool_of(regions=2)])
    _keep(node, "node0-0", CHAT)
    _keep(node, "node0-1", CODE)

    code, answer = _purge(node, "--name", "chat")

    assert code == 0
    assert [(r["region"], r["forgotten"], r["zeroed"]) for r in answer["regions"]] == [
        ("node0-0", True, True)
    ]
    with open(f"{node.root}/{POOL}/mem/node0-0", "rb") as file:
        assert not any(file.read())
    with hostprep.attach(POOL, region="node0-0", owner=CHAT, root=node.root) as memory:
        assert not memory.contents_kept
    with hostprep.attach(POOL, region="node0-1", owner=CODE, root=node.root) as memory:
        assert memory.contents_kept


def test_without_the_right_to_zero_the_owner_gets_nothing_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hostprep.cli.main import main

    node.prepare([pool_of()])
    _keep(node, "node0-0", CHAT)
    monkeypatch.setattr("hostprep.cli.purge.may_scrub_pool", lambda _paths: False)

    assert main(["purge", POOL, "--root", node.root]) == 0

    sidecar = read_sidecar(PoolPaths(node.root, POOL), "node0-0")
    assert sidecar is not None
    assert sidecar.owner is None
    with hostprep.attach(POOL, owner=CHAT, root=node.root) as memory:
        assert not memory.contents_kept
        assert memory.buffer[:4].tobytes() == bytes(4)


def test_a_leased_region_is_left_alone_and_named(node: Node) -> None:
    node.prepare([pool_of()])
    with hostprep.attach(POOL, owner=CHAT, root=node.root) as memory:
        memory.buffer[:4] = b"kept"
        for options in ((), ("--dry-run",)):
            code, answer = _purge(node, *options)
            assert code == 1
            assert "left alone" in answer["regions"][0]["problem"]
        assert memory.buffer[:4].tobytes() == b"kept"
    with hostprep.attach(POOL, owner=CHAT, root=node.root) as memory:
        assert memory.contents_kept


def test_a_dry_run_changes_nothing_and_bad_input_is_refused(node: Node) -> None:
    node.prepare([pool_of()])
    _keep(node, "node0-0", CHAT)

    assert _purge(node, "--dry-run")[1]["regions"][0]["forgotten"] is False
    assert _purge(node, "--region", "node0-7")[0] == 2
    assert _purge(node, "--name", "No Name")[0] == 2
    mistyped = run_hostprep("purge", POOL, "--root", node.root, "--name", "chta")
    assert mistyped.returncode == 0
    assert "keeps nothing under the name chta; what it keeps: chat" in mistyped.stdout
    assert run_hostprep("purge", "other", "--root", node.root).returncode == 1
    with hostprep.attach(POOL, owner=CHAT, root=node.root) as memory:
        assert memory.contents_kept


def test_status_shows_what_is_kept_and_what_the_engine_reports(node: Node) -> None:
    node.prepare([pool_of()])
    assert _kept(node)["node0-0"] is None
    _keep(node, "node0-0", CHAT)
    report = {
        "name": "ignored",
        "recovered_blocks": 7,
        "recovered_bytes": 4096,
        "kept_blocks": 9,
        "loaded_blocks": 3,
        "refused": {"kv_dtype": ["auto", "fp8\x1b[2J"], "weights": ["", "unknown"]},
        "at_s": 1,
    }
    Path(PoolPaths(node.root, POOL).warm_report("node0-0")).write_text(json.dumps(report))

    kept = _kept(node)["node0-0"]

    assert (kept["name"], kept["recovered_blocks"], kept["kept_blocks"]) == ("chat", 7, 9)
    assert kept["refused"] == {
        "kv_dtype": ["auto", "fp8\ufffd[2J"],
        "weights": ["", "unknown"],
    }
    told = run_hostprep("status", POOL, "--root", node.root).stdout
    assert "chat" in told
    assert "kv_dtype: fp8\ufffd[2J, kept auto; weights: unknown" in " ".join(told.split())
    assert "\x1b" not in told
    _purge(node)
    assert _kept(node)["node0-0"] is None
    assert not os.path.lexists(PoolPaths(node.root, POOL).warm_report("node0-0"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 9,
        b"[]",
        b'{"recovered_blocks": -1}',
        b'{"recovered_blocks": 1e400}',
        b'{"recovered_blocks": 1, "recovered_bytes": 2, "kept_blocks": ' + b"9" * 30 + b"}",
        b" " * (300 << 10),
    ],
)
def test_a_report_that_cannot_be_read_is_none(node: Node, content: bytes) -> None:
    node.prepare([pool_of()])
    _keep(node, "node0-0", CHAT)
    paths = PoolPaths(node.root, POOL)
    Path(paths.warm_report("node0-0")).write_bytes(content)

    assert read_warm_report(paths, "node0-0") is None
    assert _kept(node)["node0-0"]["name"] == "chat"


def test_refusals_are_bounded(node: Node) -> None:
    node.prepare([pool_of()])
    many = {f"field{number}": ["x" * 5000, number] for number in range(500)}
    many["k" * 500] = ["a", "b"]
    counts = ("recovered_blocks", "recovered_bytes", "kept_blocks", "loaded_blocks", "at_s")
    report: dict[str, object] = {**dict.fromkeys(counts, 0), "refused": many}
    paths = PoolPaths(node.root, POOL)
    Path(paths.warm_report("node0-0")).write_text(json.dumps(report)[: 200 << 10])
    assert read_warm_report(paths, "node0-0") is None  # cut: no JSON
    report["refused"] = dict(list(many.items())[-40:])
    Path(paths.warm_report("node0-0")).write_text(json.dumps(report))
    found = read_warm_report(paths, "node0-0")
    assert found is not None
    assert 0 < len(found.refused) < 40
    assert all(len(text) <= 200 for pair in found.refused.values() for text in pair)
