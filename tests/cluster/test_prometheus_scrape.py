"""A real Prometheus scrapes the real agent and operator of a cluster in trouble: what it then
answers to the dashboard's queries is what the test has caused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from testbed.processes import wait_for
from tests.cluster.observed_cluster import POOL_BYTES, SILENT, WARM, Observed, observed_cluster
from tests.cluster.prometheus import Sample
from tests.support.observability import METRICS, alerts, panels, without_variables

pytestmark = pytest.mark.cluster

_NOTHING_TO_SHOW = {
    "Damaged",
    "Problems found",
    "Regions for kubelet to hand out",
    "Reconciles that failed",
    "Workers restarted",
}
"""Panels that are empty while nothing of the kind has happened."""
_NOT_CAUSED = {
    "hostprep_device_plugin_registered",
    "hostprep_devices",
    "hostprep_operator_reconcile_errors_total",
    "hostprep_verify_problems_total",
}


@pytest.fixture(scope="module")
def observed() -> Iterator[Observed]:
    with observed_cluster() as observed:
        yield observed


def _panel(title: str) -> list[str]:
    """The queries of a panel as Grafana sends them, all nodes and pools chosen."""
    found = next(panel for panel in panels() if panel["title"] == title)
    return [without_variables(t["expr"], rate_interval="30s") for t in found["targets"]]


def _by(samples: list[Sample], *labels: str) -> dict[tuple[str, ...], float]:
    return {tuple(s.labels.get(name, "") for name in labels): s.value for s in samples}


def _ask(
    observed: Observed, title: str, *labels: str, query: int = 0
) -> dict[tuple[str, ...], float]:
    return _by(observed.prometheus.query(_panel(title)[query]), *labels)


def test_every_panel_that_has_something_to_show_shows_it(observed: Observed) -> None:
    def empty() -> set[str]:
        return {
            panel["title"]
            for panel in panels()
            if not any(observed.prometheus.query(expr) for expr in _panel(panel["title"]))
        }

    wait_for(lambda: empty() <= _NOTHING_TO_SHOW, 15, why="panels are empty")


def test_every_metric_that_the_modules_define_is_scraped(observed: Observed) -> None:
    scraped = {
        sample.labels["__name__"]
        for sample in observed.prometheus.query('{__name__=~"hostprep_.+"}')
    }
    wanted = {metric.name + ("_count" if metric.kind == "histogram" else "") for metric in METRICS}
    assert wanted - scraped <= _NOT_CAUSED


def test_a_pool_too_large_for_its_node_is_a_failed_node_of_that_pool(observed: Observed) -> None:
    nodes = _ask(observed, "Nodes of a pool by state", "pool", "state")
    assert nodes["vast", "selected"] == 1
    assert nodes["vast", "failed"] == 1
    assert nodes["vast", "ready"] == 0
    worst = _ask(observed, "Worst first", "node", "pool", "phase")
    assert set(worst) == {("here", "vast", "Failed")}
    assert 0 < worst["here", "vast", "Failed"] < 600
    shares = _ask(observed, "Pools", "pool")
    assert shares["vast",] == 0
    failures = _ask(observed, "Failures to prepare", "pool", "reason")
    assert failures["vast", "TooLarge"] >= 1


def test_a_reboot_closes_its_node_and_is_counted_once(observed: Observed) -> None:
    assert observed.prometheus.value("hostprep_operator_reboots_detected_total") == 1
    assert observed.prometheus.value('hostprep_operator_closings_total{cause="reboot"}') == 1
    closed = _ask(observed, "Nodes opened and closed", "cause", query=1)
    assert closed["reboot",] == pytest.approx(1, rel=0.5)
    reboots = _ask(observed, "Reboots and missed deadlines")
    assert reboots[()] == pytest.approx(1, rel=0.5)
    ready = 'hostprep_operator_pool_nodes{pool="kv",state="ready"}'
    wait_for(lambda: observed.prometheus.value(ready) == 1, 10, why="not counted as unready")
    nodes = _ask(observed, "Nodes of a pool by state", "pool", "state")
    assert nodes["kv", "selected"] == 3
    share = _ask(observed, "Nodes ready, of those selected", "pool")
    assert share == {("kv",): pytest.approx(1 / 3), ("vast",): 0}
    assert _ask(observed, "Nodes not ready") == {(): 3}


def test_a_node_whose_agent_says_nothing_stays_closed_and_ages(observed: Observed) -> None:
    taints = observed.cluster.api.get(f"/api/v1/nodes/{SILENT}")["spec"]["taints"]
    assert taints
    verdicts = _ask(observed, "Nodes by verdict", "state")
    others = {("unknown",): 0, ("waiting",): 0, ("releasing",): 0}
    assert verdicts == {("ready",): 1, ("closed",): 2, **others}
    before = _ask(observed, "Longest closed")[()]
    assert before > 0
    wait_for(lambda: _ask(observed, "Longest closed")[()] > before + 1, 10, why="it ages not")


def test_the_agents_memory_is_shown_in_bytes(observed: Observed) -> None:
    ready = observed.prometheus.value(_panel("Memory ready")[0])
    assert ready == POOL_BYTES
    assert _ask(observed, "Regions by state", "state") == {("Free",): POOL_BYTES}
    assert _ask(observed, "Regions by backing", "backing") == {("Base",): POOL_BYTES}
    assert _ask(observed, "Memory populated", "pool", "backing") == {("kv", "Base"): POOL_BYTES}
    assert _ask(observed, "Regions leased", "pool")["kv",] == 0


def test_a_warm_restart_that_was_refused_is_shown_by_field(observed: Observed) -> None:
    assert _ask(observed, "Refusals by field", "pool", "field") == {("kv", "weights"): 1}
    given_up = 'hostprep_kept_given_up_total{pool="kv",reason="Other"}'
    assert observed.prometheus.value(given_up) == 1
    assert observed.prometheus.value("hostprep_recovered_blocks_total") == 3
    assert _ask(observed, "Kept for owners", "state") == {("Leased",): 0, ("Retained",): 0}


def test_an_event_names_the_field_that_was_refused_and_no_value(observed: Observed) -> None:
    events = observed.cluster.api.get("/apis/events.k8s.io/v1/events")["items"]
    (event,) = [one for one in events if one["reason"] == "WarmRestartRefused"]
    assert event["regarding"]["kind"] == "HostMemoryNode"
    assert event["regarding"]["name"] == "here"
    assert f'kept for "{WARM}"' in event["note"]
    assert "weights" in event["note"]
    assert "/a" not in event["note"]


def test_times_to_ready_are_numbers_and_not_longer_than_the_test(observed: Observed) -> None:
    joining = _ask(observed, "From joining or reboot to open")[()]
    preparing = _ask(observed, "Preparing", "pool")["kv",]
    assert 0 < joining < 120
    assert 0 < preparing < 60
    assert not math.isnan(joining + preparing)


def test_agent_and_operator_are_well(observed: Observed) -> None:
    assert _ask(observed, "Agents down") == {(): 0}
    assert _ask(observed, "Agents without API server") == {(): 0}
    assert _ask(observed, "Age of the last verification", "node")["here",] < 15
    assert _ask(observed, "Leaders") == {(): 1}
    assert _ask(observed, "Age of its view")[()] < 120
    assert _ask(observed, "Queue") == {(): 0}
    components = _ask(observed, "Versions", "component")
    assert components == {("agent",): 1, ("operator",): 1}


def test_the_alerts_of_these_troubles_are_pending_and_no_others(observed: Observed) -> None:
    rules = observed.prometheus.rules()
    assert {rule["health"] for rule in rules} == {"ok"}
    pending = {rule["name"] for rule in rules if rule.get("state") in {"pending", "firing"}}
    assert pending == {"HostprepNodesFailed"}
    loaded = {rule["name"] for rule in rules if rule["type"] == "alerting"}
    assert loaded == {alert["alert"] for alert in alerts()}


def test_processes_that_end_are_seen_as_down(observed: Observed) -> None:
    """The last one: the tests above need both processes."""
    observed.agent.kill()
    observed.operator.kill()

    def pending() -> set[str]:
        rules = observed.prometheus.rules()
        return {rule["name"] for rule in rules if rule.get("state") == "pending"}

    wait_for(lambda: "HostprepOperatorDown" in pending(), 20, why="not seen as down")
    assert _ask(observed, "Agents down") == {(): 1}
