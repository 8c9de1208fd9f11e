"""The custom resources on a real API server: what it accepts, refuses, fills in and shows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from hostprep.api.conditions import Condition
from hostprep.api.names import (
    API_VERSION,
    GROUP,
    NODE_KIND,
    NODE_PLURAL,
    POOL_KIND,
    POOL_PLURAL,
    VERSION,
)
from hostprep.api.node_resource import NodeStatus, PoolEntry, PoolStatus, entries_of, policy_of
from hostprep.api.pool_resource import load_pools, spec_from_policy
from hostprep.api.versions import WRITTEN_API_VERSION
from testbed.api import APPLY_PATCH, Api, ApiError
from tests.support.host_memory_nodes import full_status
from tests.support.pool_corpus import (
    BAD,
    GOOD,
    Case,
    mutated_pools,
    names,
    quantities,
    selects_nothing,
    verdict_of_command_line,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crds")]

JsonObject = dict[str, Any]
POOLS = f"/apis/{GROUP}/{VERSION}/{POOL_PLURAL}"
WRITTEN_POOLS = f"/apis/{WRITTEN_API_VERSION}/{POOL_PLURAL}"
NODES = f"/apis/{GROUP}/{VERSION}/{NODE_PLURAL}"
WRITTEN_NODES = f"/apis/{WRITTEN_API_VERSION}/{NODE_PLURAL}"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
STRICT = {"fieldValidation": "Strict"}
DRY_RUN = {"dryRun": "All", **STRICT}
on_a_server = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def collection_of(document: JsonObject) -> str:
    """Where a pool is created, by its version."""
    return f"/apis/{document['apiVersion']}/{POOL_PLURAL}"


def verdict_of_server(api: Api, document: JsonObject) -> str:
    """The refusal, or nothing for a pool that is accepted."""
    try:
        api.create(collection_of(document), document, **DRY_RUN)
    except ApiError as error:
        if error.status in {400, 422}:
            return error.message
        raise
    return ""


@pytest.fixture
def created(api: Api) -> Iterator[Callable[[str, JsonObject], JsonObject]]:
    """`created(collection, object)`: creates it, and deletes it after the test."""
    paths: list[str] = []

    def create(collection: str, document: JsonObject) -> JsonObject:
        paths.append(f"{collection}/{document['metadata']['name']}")
        return api.create(collection, document, **STRICT)

    yield create
    for path in paths:
        api.delete(path)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_good_pool_is_stored_and_stays_the_pool_that_it_was(
    created: Callable[[str, JsonObject], JsonObject], case: Case
) -> None:
    stored = created(collection_of(case.document), case.document)
    (before,) = load_pools(case.text, source="before")
    (after,) = load_pools(yaml.safe_dump(stored), source="after")
    assert spec_from_policy(before.name, "", policy_of(stored["spec"])) == before
    assert after.uid == stored["metadata"]["uid"]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_a_bad_pool_is_refused_with_the_field_named(
    api: Api, created: Callable[[str, JsonObject], JsonObject], case: Case
) -> None:
    message = verdict_of_server(api, case.document)
    assert names(message, case.field), message
    with pytest.raises(ApiError):
        created(collection_of(case.document), case.document)


@on_a_server
@given(document=mutated_pools())
def test_server_and_command_line_judge_alike(api: Api, document: JsonObject) -> None:
    of_server = verdict_of_server(api, document)
    of_command_line = verdict_of_command_line(document)
    if selects_nothing(document):
        # Without a cluster nobody selects nodes: such a file serves a single machine all the same.
        assert of_server
    else:
        assert bool(of_server) == bool(of_command_line), of_server or of_command_line


@on_a_server
@given(size=quantities)
def test_server_and_command_line_read_quantities_alike(api: Api, size: str) -> None:
    spec = {"allNodes": True, "size": size, "reserve": size}
    document = copy.deepcopy(GOOD[0].document) | {"spec": spec}
    of_server = verdict_of_server(api, document)
    of_command_line = verdict_of_command_line(document)
    assert bool(of_server) == bool(of_command_line), of_server or of_command_line


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_accepted(api: Api, path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] == POOL_KIND:
            assert verdict_of_server(api, document) == ""


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_pool_is_the_same_in_both_versions_with_every_field(
    api: Api, created: Callable[[str, JsonObject], JsonObject], case: Case
) -> None:
    stored = created(collection_of(case.document), case.document)
    name = stored["metadata"]["name"]
    for collection in (POOLS, WRITTEN_POOLS):
        read = api.get(f"{collection}/{name}")
        assert collection == collection_of(read)
        assert read["spec"] == stored["spec"]
        assert _kept(case.document["spec"], read["spec"]), "a field is not as it was written"


def _kept(written: object, read: object) -> bool:
    """Whether all that was written is there, beside defaults; nulls are fields not written."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(v is None or (k in read and _kept(v, read[k])) for k, v in written.items())
    if isinstance(written, list) and isinstance(read, list):
        return len(written) == len(read) and all(map(_kept, written, read))
    return written == read


@pytest.mark.parametrize(("field", "old"), [("attach", {"mode": "hostPath"}), ("boot", "systemd")])
def test_a_pool_with_the_old_spelling_can_be_changed_by_those_who_write_the_new_version(
    api: Api, created: Callable[[str, JsonObject], JsonObject], field: str, old: object
) -> None:
    spec = {"allNodes": True, "size": "8Gi", field: old}
    document = {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": {"name": "old"}}
    created(POOLS, {**document, "spec": spec})
    changed = api.patch(f"{WRITTEN_POOLS}/old", {"spec": {"priority": 7}}, **STRICT)
    assert changed["spec"][field] == old
    assert changed["spec"]["priority"] == 7
    with pytest.raises(ApiError, match="Unsupported value"):
        api.create(
            WRITTEN_POOLS,
            {**document, "apiVersion": WRITTEN_API_VERSION, "spec": spec},
            **DRY_RUN,
        )


def test_a_node_is_the_same_in_both_versions_with_every_field(
    api: Api, created: Callable[[str, JsonObject], JsonObject]
) -> None:
    every = policy_of(next(c for c in GOOD if c.name == "every-field").document["spec"])
    entries = (
        PoolEntry(name="kv", uid="0a1b", generation=3, policy=every, release_after_s=1_800_000_000),
        PoolEntry(name="gone", absent=True),
    )
    status = {"status": full_status().to_json()}
    for number, written in enumerate((NODES, WRITTEN_NODES)):
        document = host_memory_node(f"node-{number}", *entries)
        document["apiVersion"] = written.removeprefix("/apis/").rpartition("/")[0]
        stored = created(written, document)
        assert stored["spec"] == document["spec"]
        stored = api.patch(f"{written}/node-{number}/status", status, **STRICT)
        for collection in (NODES, WRITTEN_NODES):
            read = api.get(f"{collection}/node-{number}")
            assert (read["spec"], read["status"]) == (document["spec"], status["status"])
            assert entries_of(read) == entries


def test_a_pool_that_was_stored_without_a_selector_can_be_changed_and_gains_one_for_good(
    pool_without_selector: Api,
) -> None:
    api = pool_without_selector
    for collection in (POOLS, WRITTEN_POOLS):
        path = f"{collection}/kv"
        changes: tuple[JsonObject, ...] = (
            {"priority": 7},
            {"size": "16Gi"},
            {"deletionProtection": "None"},
        )
        for change in changes:
            changed = api.patch(path, {"spec": change}, **STRICT)["spec"]
            assert change.items() <= changed.items()
            assert not changed.keys() & {"allNodes", "nodeSelector", "nodeSelectorTerms"}
        assert api.patch(f"{path}/status", {"status": {"selected": 3}})["status"]["selected"] == 3
    terms = [{"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]
    selections: tuple[JsonObject, ...] = (
        {"nodeSelector": {"gpu": "true"}},
        {"nodeSelectorTerms": terms},
        {"allNodes": True},
    )
    for selection in selections:
        nothing: JsonObject = dict.fromkeys(("allNodes", "nodeSelector", "nodeSelectorTerms"))
        api.patch(f"{WRITTEN_POOLS}/kv", {"spec": nothing | selection}, **STRICT)
        for none in (nothing, nothing | {"allNodes": False}):
            with pytest.raises(ApiError, match="spec selects no nodes"):
                api.patch(f"{WRITTEN_POOLS}/kv", {"spec": none}, **STRICT)


def test_a_pool_gets_its_defaults_and_nothing_that_means_unset(
    created: Callable[[str, JsonObject], JsonObject],
) -> None:
    case = next(case for case in GOOD if case.name == "size-alone")
    assert created(WRITTEN_POOLS, case.document)["spec"] == {
        "allNodes": True,
        "size": "8Gi",
        "priority": 0,
        "backings": ["HugeTLB2Mi", "THP", "Base"],
        "regions": "PerNUMANode",
        "access": {"mode": "0660"},
        "scrub": {"when": "OnRelease"},
        "attach": {},
        "readiness": {
            "required": True,
            "profile": "ClusterAutoscaler",
            "reclose": {"reboot": "Taint", "repair": "LabelOnly", "resize": "LabelOnly"},
            "deadlineSeconds": 600,
            "onDeadline": "StayClosed",
        },
        "accounting": {"require": False},
        "rollout": {"maxUnavailable": "10%", "paused": False},
        "deletionProtection": "WhileLeased",
        "deletionPolicy": "Release",
    }


def test_a_change_to_a_bad_pool_is_refused_and_the_old_one_stays(
    api: Api, created: Callable[[str, JsonObject], JsonObject]
) -> None:
    stored = created(WRITTEN_POOLS, GOOD[0].document)
    path = f"{POOLS}/{stored['metadata']['name']}"
    with pytest.raises(ApiError) as caught:
        api.patch(path, {"spec": {"size": "lots"}}, **STRICT)
    assert names(caught.value.message, "spec.size")
    assert api.get(path)["spec"] == stored["spec"]


def test_two_who_apply_different_fields_do_not_undo_each_other(
    api: Api, created: Callable[[str, JsonObject], JsonObject]
) -> None:
    stored = created(WRITTEN_POOLS, GOOD[0].document)
    path = f"{POOLS}/{stored['metadata']['name']}"
    for manager, spec in (("a", {"priority": 7}), ("b", {"readiness": {"deadlineSeconds": 60}})):
        document = {
            "apiVersion": API_VERSION,
            "kind": POOL_KIND,
            "metadata": {"name": stored["metadata"]["name"]},
            "spec": spec,
        }
        api.patch(
            path, document, content_type=APPLY_PATCH, fieldManager=manager, force="true", **STRICT
        )
    spec = api.get(path)["spec"]
    assert spec["priority"] == 7
    assert spec["readiness"]["deadlineSeconds"] == 60
    assert spec["readiness"]["reclose"]["reboot"] == "Taint"


def pool_status() -> JsonObject:
    counts = (
        *("selected", "ready", "updated", "preparing", "degraded", "failed", "releasing"),
        *("unavailable", "blocked", "leaving", "leased"),
    )
    condition = Condition(
        type="Ready", status="False", reason="SomeFailed", message="1 of 5 nodes failed", since_s=0
    )
    return {
        "observedGeneration": 1,
        **{name: number for number, name in enumerate(counts, start=1)},
        "readySize": "48Gi",
        "conditions": [condition.to_json()],
    }


def test_a_pool_shows_its_state_at_a_glance(
    api: Api,
    created: Callable[[str, JsonObject], JsonObject],
    kubectl: Callable[..., str],
) -> None:
    document = copy.deepcopy(next(case for case in GOOD if case.name == "every-field").document)
    name = document["metadata"]["name"] = "glance"
    created(WRITTEN_POOLS, document)
    status = pool_status()
    stored = api.patch(f"{POOLS}/{name}/status", {"status": status}, **STRICT)
    assert stored["status"] == status
    head, row = kubectl("get", "hmp", name).splitlines()
    counts = "SELECTED READY PREPARING FAILED READY-SIZE"
    assert " ".join(head.split()) == f"NAME SIZE PERCENT {counts} STATUS AGE"
    assert " ".join(row.split()).startswith("glance 62 1 2 4 6 48Gi SomeFailed ")
    wide = kubectl("get", "hmp", name, "-o", "wide")
    for shown in ('["HugeTLB1Gi","Base"]', "Karpenter", "1 of 5 nodes failed"):
        assert shown in wide
    head, row = wide.splitlines()
    for column, number in {"BLOCKED": 9, "LEASED": 11, "LEAVING": 10, "RELEASING": 7}.items():
        assert row[head.index(column) :].split()[0] == str(number), wide


def host_memory_node(name: str, *entries: PoolEntry) -> JsonObject:
    return {
        "apiVersion": API_VERSION,
        "kind": NODE_KIND,
        "metadata": {"name": name},
        "spec": {"pools": [entry.to_json() for entry in entries]},
    }


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_policy_comes_back_from_a_node_as_it_was_copied(api: Api, case: Case) -> None:
    stored = api.create(collection_of(case.document), case.document, **DRY_RUN)
    policy = policy_of(stored["spec"])
    entry = PoolEntry(name=stored["metadata"]["name"], uid="0a1b", generation=1, policy=policy)
    node = api.create(NODES, host_memory_node("node-a", entry), **DRY_RUN)
    assert entries_of(node) == (entry,)


def test_a_status_comes_back_as_the_agent_wrote_it(
    api: Api,
    created: Callable[[str, JsonObject], JsonObject],
    kubectl: Callable[..., str],
) -> None:
    name = "a" * 63 + "." + "b" * 63 + "." + "c" * 63 + "." + "d" * 61  # 253: the longest
    created(NODES, host_memory_node(name, PoolEntry(name="kv", absent=True)))
    status = full_status()
    stored = api.patch(f"{NODES}/{name}/status", {"status": status.to_json()}, **STRICT)
    assert NodeStatus.from_json(stored["status"]) == status
    assert stored["status"] == status.to_json()
    shown = kubectl("get", "hmn", name, "-o", "wide")
    for text in ("kv 4 of 8 GiB", "Damaged", status.boot_id, "0.1.0"):
        assert text in shown


def test_a_status_that_says_nothing_yet_is_accepted(
    api: Api, created: Callable[[str, JsonObject], JsonObject]
) -> None:
    created(NODES, host_memory_node("node-empty"))
    body = {"status": NodeStatus(pools=(PoolStatus(name="kv"),)).to_json()}
    stored = api.patch(f"{NODES}/node-empty/status", body, **STRICT)
    assert stored["status"] == body["status"]


@pytest.mark.parametrize("plural", ["hmp", "hmn", "hostprep"])
def test_short_names_and_the_category_are_served(kubectl: Callable[..., str], plural: str) -> None:
    kubectl("get", plural)


@pytest.mark.parametrize("version", [API_VERSION, WRITTEN_API_VERSION])
@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("hmp.spec", "Exactly one of size, percent, regionSize and sizing"),
        ("hmp.spec.size", "quantity such as 8Gi"),
        ("hmp.spec.readiness", "held back from engines until the pool is ready"),
        ("hmp.spec.readiness.deadlineSeconds", "Default 600"),
        ("hmp.status", "How many nodes are where"),
        ("hmn.spec.pools.state", "only instruction that releases memory"),
        ("hmn.status.pools.regions.state", "Leased"),
    ],
)
def test_explain_tells_what_a_field_is_for(
    kubectl: Callable[..., str], version: str, field: str, words: str
) -> None:
    kubectl("api-resources", f"--api-group={GROUP}")  # explain alone trusts an old discovery
    shown = kubectl("explain", field, f"--api-version={version}")
    assert words in " ".join(shown.split())
    assert ["VERSION:", version.partition("/")[2]] in [line.split() for line in shown.splitlines()]
