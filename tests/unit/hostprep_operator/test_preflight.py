"""The pure part of an uninstall: what refuses it, whose turn it is, what nodes are told."""

from __future__ import annotations

from typing import Any

import pytest

from hostprep_operator.pools_backup import (
    MAX_PARTS,
    PART_BYTES,
    manifest_of,
    manifests_without_room,
    patch_after_all,
    patch_before_deleting,
)
from hostprep_operator.preflight import (
    SHOWN,
    Holder,
    check_leased,
    check_unreachable,
    entries_after,
    reachable_nodes,
    share_of,
    turns,
    why_left,
)
from hostprep_operator.records import NodeRecord

pytestmark = pytest.mark.unit
GIB = 1 << 30


def _holder(
    name: str = "a",
    *,
    state: str = "Present",
    leased: int = 0,
    held: bool = True,
    boot_id: str = "b",
    observed: int = 1,
    policy: dict[str, Any] | None = None,
    kept_pools: frozenset[str] = frozenset(),
) -> Holder:
    region = {"name": "r", "sizeBytes": GIB}
    pool = {"name": "kv", "regions": [region, region], "regionsLeased": leased}
    entry = {"name": "kv", "uid": "u", "generation": 3, "state": state, "policy": policy or {}}
    status = {"bootID": boot_id, "observedGeneration": observed, "pools": [pool] if held else []}
    metadata = {"name": name, "uid": "u", "generation": 1}
    document = {"metadata": metadata, "spec": {"pools": [entry]}, "status": status}
    return Holder.from_json(document, kept_pools)


def _node(name: str = "a", *, boot_id: str = "b", ready: str = "True") -> NodeRecord:
    conditions = [{"type": "Ready", "status": ready}]
    status = {"nodeInfo": {"bootID": boot_id}, "conditions": conditions}
    return NodeRecord.from_json({"metadata": {"name": name}, "status": status})


def test_a_refusal_names_the_first_ten_and_the_total() -> None:
    names = [f"n{i:02}" for i in range(25)]
    refusal = check_leased([_holder(n, leased=1) for n in names], {n: _node(n) for n in names})
    assert refusal is not None
    assert (refusal.total, len(refusal.first)) == (25, SHOWN)
    assert refusal.first[0] == "n00 (kv: 1 of 2 regions)"
    assert "and 15 more" in refusal.text


@pytest.mark.parametrize("node", [None, _node(boot_id="after a reboot")])
def test_leases_of_a_boot_that_is_over_are_none(node: NodeRecord | None) -> None:
    assert check_leased([_holder(leased=1)], {"a": node} if node else {}) is None


@pytest.mark.parametrize(
    ("node", "agents", "reachable"),
    [
        (_node(), {"a": True}, True),
        (_node(), {"a": False}, False),
        (_node(), {}, False),
        (_node(ready="Unknown"), {"a": True}, False),
        (None, {}, True),  # its memory went with it
        (_node(), None, True),  # agents without Pods
    ],
)
def test_an_agent_can_act_where_its_pod_and_its_node_are_ready(
    node: NodeRecord | None, agents: dict[str, bool] | None, reachable: bool
) -> None:
    holder = _holder()
    found = reachable_nodes([holder], {"a": node} if node else {}, agents)
    assert ("a" in found) == reachable
    refusal = check_unreachable([holder], found)
    assert (refusal is None) == reachable
    assert refusal is None or refusal.first == ("a (2 GiB)",)


def test_where_nothing_is_held_no_agent_is_needed() -> None:
    assert check_unreachable([_holder(held=False)], frozenset()) is None


def test_a_retained_pool_is_neither_told_to_go_nor_waited_for() -> None:
    by_pool = _holder(leased=1, kept_pools=frozenset({"kv"}))
    by_entry = _holder(leased=1, policy={"deletionPolicy": "Retain"})
    for holder in (by_pool, by_entry):
        assert entries_after(holder) == ()
        assert (holder.held, holder.leased) == ({}, {})
    told_before = _holder(state="Absent", kept_pools=frozenset({"kv"}))
    assert told_before.held
    assert entries_after(told_before) == told_before.entries


def test_an_entry_is_told_once_and_goes_when_its_agent_has_read_it_and_holds_nothing() -> None:
    (told,) = entries_after(_holder())
    assert told == {"name": "kv", "uid": "u", "generation": 3, "state": "Absent"}
    for holding in (_holder(state="Absent"), _holder(state="Absent", held=False, observed=0)):
        assert entries_after(holding) == holding.entries
    assert entries_after(_holder(state="Absent", held=False)) == ()


def test_a_tenth_of_the_nodes_at_a_time_and_who_waits_takes_nobodys_turn() -> None:
    assert [share_of(n) for n in (0, 1, 10, 11, 2000)] == [1, 1, 1, 2, 200]
    waiting = [_holder(f"w{i}") for i in range(5)]
    names = frozenset(f"{c}{i}" for c in "wbl" for i in range(5))
    busy = _holder("b0", state="Absent")
    leased = _holder("l0", state="Absent", leased=1)
    dead = _holder("d0", state="Absent")
    due = turns([busy, leased, dead, *waiting], reachable=names, at_once=3)
    assert [holder.name for holder in due] == ["w0", "w1"]
    assert turns([busy, *waiting], reachable=names, at_once=1) == ()
    # Nothing to wait for: nothing held, or nobody to release it.
    free = [_holder("e0", held=False), _holder("d1")]
    assert turns([busy, *free, *waiting], reachable=names, at_once=1) == tuple(free)
    assert [why_left(h, names) for h in (busy, leased, dead, waiting[0])] == [
        "being released",
        "leased (kv: 1 of 2 regions)",
        "no agent that is Ready",
        "waits for its turn",
    ]


def _pool(**spec: Any) -> dict[str, Any]:
    written = {"name": "kv", "annotations": {"a": "b"}, "labels": {"c": "d"}}
    server = {"uid": "u", "resourceVersion": "7", "managedFields": [], "finalizers": ["x"]}
    spec = {"size": "1Gi", "nodeSelector": {"a": "b"}, **spec}
    return {"metadata": written | server, "spec": spec, "status": {"ready": 1}}


@pytest.mark.parametrize(
    "spec",
    [{}, {"deletionProtection": "Always"}, {"release": {"when": "AfterGracePeriod"}}],
)
def test_a_manifest_is_of_the_pool_before_the_uninstall_changed_it(spec: dict[str, Any]) -> None:
    pool = _pool(**spec)
    manifest = manifest_of(pool)
    assert manifest["metadata"] == {
        "name": "kv",
        "annotations": {"a": "b"},
        "labels": {"c": "d"},
    }
    assert "status" not in manifest
    patch = patch_before_deleting(pool)
    assert patch["metadata"]["resourceVersion"] == "7"
    changed = _pool(**patch["spec"])
    changed["metadata"]["annotations"] |= patch["metadata"]["annotations"]
    assert manifest_of(changed) == manifest
    back = patch_after_all(changed)
    assert back is not None
    merged = {k: v for k, v in (changed["spec"] | back["spec"]).items() if v is not None}
    assert merged == pool["spec"]
    assert patch_after_all(pool) is None


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", '{"size": "9Gi"}'])
def test_an_annotation_that_somebody_else_wrote_changes_nothing(text: str) -> None:
    pool = _pool()
    pool["metadata"]["annotations"]["hostprep.dev/before-uninstall"] = text
    assert manifest_of(pool)["spec"] == {"size": "1Gi", "nodeSelector": {"a": "b"}}


@pytest.mark.parametrize("selector", [{}, {"nodeSelector": {}}, {"allNodes": True}])
def test_a_pool_of_every_node_is_kept_with_the_word_that_creating_it_takes(
    selector: dict[str, Any],
) -> None:
    pool = _pool()
    pool["spec"] = {"size": "1Gi", **selector}
    assert manifest_of(pool)["spec"] == {"size": "1Gi", "allNodes": True}


def test_what_has_no_room_in_any_configmap_is_found_before() -> None:
    def pool(name: str, size: int) -> dict[str, Any]:
        return {"kind": "HostMemoryPool", "metadata": {"name": name, "note": "x" * size}}

    assert manifests_without_room([pool("huge", PART_BYTES)]) == ["huge"]
    many = [pool(f"p{i}", PART_BYTES // 2 + 1) for i in range(MAX_PARTS + 1)]
    assert manifests_without_room(many) == [f"p{MAX_PARTS}"]
