"""The chart, rendered by the real helm: what each value does, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.api.names import (
    AGENT_COMPONENT,
    CLUSTER_AUTOSCALER_TAINT,
    COMPONENT_LABEL,
    HOST_MEMORY_READY,
    READINESS_CONTROLLER_TAINT,
)
from hostprep.cli.agent import agent as agent_command
from hostprep_operator.cli import cli as operator_commands
from tests.cluster.charts import CHART, MONITORING, PROFILES, lint, notes, render, render_error

pytestmark = pytest.mark.cluster

_TAINTS = {
    "clusterAutoscaler": CLUSTER_AUTOSCALER_TAINT,
    "karpenter": CLUSTER_AUTOSCALER_TAINT,
    "nodeReadinessController": READINESS_CONTROLLER_TAINT,
}
Document = dict[str, Any]


def find(documents: list[Document], kind: str, name: str) -> Document:
    found = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def kinds(documents: list[Document]) -> set[str]:
    return {document["kind"] for document in documents}


def pod(documents: list[Document], kind: str, name: str) -> Document:
    spec: Document = find(documents, kind, name)["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("profile", PROFILES)
def test_helm_finds_nothing_to_complain_about(profile: str) -> None:
    assert "0 chart(s) failed" in lint(*PROFILES[profile])


@pytest.mark.parametrize("profile", PROFILES)
def test_the_notes_name_the_label_and_the_taint_of_their_profile(profile: str) -> None:
    text = notes(*PROFILES[profile])
    assert "pool.hostprep.dev/kv" in text
    for taint in set(_TAINTS.values()):
        assert (taint in text) == (taint == _TAINTS.get(profile)), taint


@pytest.mark.parametrize("profile", PROFILES)
def test_what_opens_nodes_tolerates_the_profiles_taint(profile: str) -> None:
    documents = render(*PROFILES[profile])
    for kind, name in (("Deployment", "hostprep-operator"), ("Job", "hostprep-cleanup")):
        keys = {toleration["key"] for toleration in pod(documents, kind, name)["tolerations"]}
        assert "node.kubernetes.io/not-ready" in keys
        assert _TAINTS.get(profile, "node.kubernetes.io/not-ready") in keys


def test_a_readiness_rule_comes_with_its_profile_only_and_looks_again_after_reboots() -> None:
    for profile, options in PROFILES.items():
        rules = [d for d in render(*options) if d["kind"] == "NodeReadinessRule"]
        assert len(rules) == (profile == "nodeReadinessController")
        for rule in rules:
            assert rule["spec"]["enforcementMode"] == "continuous"
            assert rule["spec"]["taint"]["key"] == READINESS_CONTROLLER_TAINT
            wanted = [{"type": HOST_MEMORY_READY, "requiredStatus": "True"}]
            assert rule["spec"]["conditions"] == wanted


def test_the_operators_pods_are_restricted_and_have_a_read_only_root() -> None:
    documents = render()
    test = find(documents, "Pod", "hostprep-test")["spec"]
    for spec in (
        pod(documents, "Deployment", "hostprep-operator"),
        pod(documents, "Job", "hostprep-cleanup"),
        test,
    ):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not spec.get("hostPID")
        assert not any("hostPath" in volume for volume in spec.get("volumes", ()))
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "privileged": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
    assert test["automountServiceAccountToken"] is False


def test_a_privileged_agent_mounts_into_the_host_and_an_adopting_one_cannot() -> None:
    mounts = {}
    for mode in ("privileged", "adopt"):
        spec = pod(render("--set", f"agent.mode={mode}"), "DaemonSet", "hostprep-agent")
        (container,) = spec["containers"]
        root = next(m for m in container["volumeMounts"] if m["name"] == "root")
        mounts[mode] = root["mountPropagation"], container["securityContext"]
        paths = {v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v}
        assert {"/run/hostprep", "/var/lib/hostprep"} <= paths
        assert ("/sys/fs/cgroup" in paths) == (mode == "privileged")
    assert mounts["privileged"][0] == "Bidirectional"
    assert mounts["privileged"][1]["privileged"] is True
    propagation, security = mounts["adopt"]
    assert propagation == "HostToContainer"
    assert security["privileged"] is False
    assert security["capabilities"]["drop"] == ["ALL"]
    assert "SYS_ADMIN" not in security["capabilities"]["add"]


def test_agents_run_on_every_node_whatever_its_taints() -> None:
    documents = render()
    spec = pod(documents, "DaemonSet", "hostprep-agent")
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["priorityClassName"] == "system-node-critical"
    strategy = find(documents, "DaemonSet", "hostprep-agent")["spec"]["updateStrategy"]
    assert strategy["rollingUpdate"]["maxUnavailable"] == "10%"


def test_agents_are_found_by_the_operators_selector_under_any_name() -> None:
    documents = render("--set", "nameOverride=other,fullnameOverride=mine")
    labels = find(documents, "DaemonSet", "mine-agent")["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "hostprep"
    assert labels[COMPONENT_LABEL] == AGENT_COMPONENT


def test_a_common_label_reaches_every_object_and_every_pod() -> None:
    for document in render("--set", "commonLabels.team=infra", *MONITORING):
        meta = [document["metadata"]]
        if document["kind"] in ("Deployment", "DaemonSet", "Job"):
            meta.append(document["spec"]["template"]["metadata"])
        assert all(m["labels"]["team"] == "infra" for m in meta), document["kind"]


def test_an_upgrade_of_the_chart_alone_restarts_no_agent(tmp_path: Path) -> None:
    text = (CHART / "templates" / "agent" / "daemonset.yaml").read_text()
    template = text[text.index("  template:") :]
    assert "hostprep.labels" not in template


def test_several_operators_elect_a_leader_and_keep_one_through_a_drain() -> None:
    one, two = render(), render("--set", "operator.replicas=2")
    assert "PodDisruptionBudget" not in kinds(one)
    assert find(one, "Deployment", "hostprep-operator")["spec"]["strategy"] == {"type": "Recreate"}
    budget = find(two, "PodDisruptionBudget", "hostprep-operator")
    assert budget["spec"]["maxUnavailable"] == 1
    (container,) = pod(two, "Deployment", "hostprep-operator")["containers"]
    assert "--leader-elect" in container["args"]
    assert "--lease-name=hostprep-operator" in container["args"]
    role = next(
        d for d in two if d["kind"] == "Role" and d["metadata"]["name"] == "hostprep-operator"
    )
    named = [rule.get("resourceNames") for rule in role["rules"]]
    assert ["hostprep-operator"] in named


def test_custom_resources_are_as_in_the_files_and_kept_unless_told() -> None:
    files = [yaml.safe_load(p.read_text()) for p in sorted(CHART.glob("files/crds/*.yaml"))]
    assert len(files) == 2
    for keep in ("true", "false"):
        documents = render("--set", f"crds.keep={keep}")
        for wanted in files:
            crd = find(documents, "CustomResourceDefinition", wanted["metadata"]["name"])
            assert crd["spec"] == wanted["spec"]
            policy = crd["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
            assert policy == ("keep" if keep == "true" else None)
    assert "CustomResourceDefinition" not in kinds(render("--set", "crds.install=false"))


def test_monitoring_follows_what_the_cluster_knows_unless_told() -> None:
    there = {"PodMonitor", "PrometheusRule"}
    assert not there & kinds(render())
    assert there <= kinds(render(*MONITORING))
    assert not there & kinds(
        render(*MONITORING, "--set", "podMonitor.enabled=false,prometheusRule.enabled=false")
    )
    assert there <= kinds(render("--set", "podMonitor.enabled=true,prometheusRule.enabled=true"))


def test_targets_get_the_job_and_node_that_rules_and_dashboards_look_for() -> None:
    documents = render(*MONITORING)
    for component in ("agent", "operator"):
        monitor = find(documents, "PodMonitor", f"hostprep-{component}")
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        targets = {r["targetLabel"]: r.get("replacement") for r in endpoint["relabelings"]}
        assert targets["job"] == f"hostprep-{component}"
        assert ("node" in targets) == (component == "agent")


def test_rules_and_dashboards_arrive_unchanged() -> None:
    documents = render(*MONITORING)
    rules = [yaml.safe_load(p.read_text()) for p in sorted(CHART.glob("files/rules/*.yaml"))]
    groups = [group for rule in rules for group in rule["groups"]]
    assert find(documents, "PrometheusRule", "hostprep")["spec"]["groups"] == groups
    for path in CHART.glob("files/dashboards/*.json"):
        dashboard = find(documents, "ConfigMap", f"hostprep-dashboard-{path.stem}")
        assert dashboard["data"][path.name] == path.read_text()
        assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize(
    "options", ["agent.mode=privileged", "agent.mode=adopt,agent.devicePlugin.enabled=true"]
)
def test_the_agent_has_kubelets_folder_for_device_plugins(options: str) -> None:
    options += ",agent.kubeletDir=/data/kubelet"
    spec = pod(render("--set", options), "DaemonSet", "hostprep-agent")
    (container,) = spec["containers"]
    assert "--kubelet-dir=/data/kubelet" in container["args"]
    folder = "/data/kubelet/device-plugins"
    assert {"name": "device-plugins", "mountPath": folder} in container["volumeMounts"]
    host = {"path": folder, "type": "DirectoryOrCreate"}
    assert {"name": "device-plugins", "hostPath": host} in spec["volumes"]


@pytest.mark.parametrize(
    "options",
    [
        "agent.devicePlugin.enabled=false",
        "agent.mode=adopt",
        "agent.mode=adopt,agent.devicePlugin.enabled=auto",
    ],
)
def test_without_device_plugins_the_agent_has_nothing_of_kubelets(options: str) -> None:
    """Least privilege: whoever writes to that folder can register any resource."""
    documents = render("--set", options)
    assert "kubelet" not in json.dumps(pod(documents, "DaemonSet", "hostprep-agent"))


def test_a_digest_goes_before_the_tag() -> None:
    digest = "sha256:" + "a" * 64
    options = f"image.registry=example.org/x,image.tag=v9,image.digest={digest}"
    (container,) = pod(render("--set", options), "DaemonSet", "hostprep-agent")["containers"]
    assert container["image"] == f"example.org/x/hostprep@{digest}"


def test_without_a_registry_the_chart_refuses_and_says_how_an_image_gets_there() -> None:
    error = render_error("--set", "image.registry=")
    assert "image.registry is not set" in error
    assert "make image REGISTRY=" in error


def test_a_repository_may_name_its_registry_itself() -> None:
    options = "image.registry=,image.repository=example.org/x/hostprep"
    (container,) = pod(render("--set", options), "DaemonSet", "hostprep-agent")["containers"]
    assert container["image"] == "example.org/x/hostprep:0.1.0"


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("agnet.root=/x", "agnet"),
        ("agent.modes=adopt", "modes"),
        ("agent.mode=premounted", "/agent/mode"),
        ("agent.root=run/hostprep", "/agent/root"),
        ("agent.kubeletDir=var/lib/kubelet", "/agent/kubeletDir"),
        (f"agent.kubeletDir=/{'k' * 70}", "/agent/kubeletDir"),
        ("agent.devicePlugin.enabled=maybe", "/agent/devicePlugin/enabled"),
        ("agent.verifyInterval=0", "/agent/verifyInterval"),
        ("operator.replicas=0", "/operator/replicas"),
        ("operator.agentLiveness=lease", "/operator/agentLiveness"),
        ("autoscaler.profile=nrc", "/autoscaler/profile"),
        ("taintKey=not a key", "/taintKey"),
        ("admissionPolicy.taintKeys={not a key}", "/admissionPolicy/taintKeys/0"),
        ("admissionPolicy.taintKeys={}", "/admissionPolicy/taintKeys/0"),
        ("image.digest=sha256:1", "/image/digest"),
        ("podMonitor.enabled=maybe", "/podMonitor/enabled"),
    ],
)
def test_a_bad_value_is_refused_by_its_name(option: str, named: str) -> None:
    assert named in render_error("--set", option)


def test_the_readiness_profile_asks_which_nodes_it_is_about() -> None:
    error = render_error("--set", "autoscaler.profile=nodeReadinessController")
    assert "which nodes shall wait" in error


def test_metrics_are_for_monitoring_namespaces_unless_values_say_otherwise() -> None:
    def peers(documents: list[dict[str, Any]], component: str) -> list[dict[str, Any]] | None:
        policy = find(documents, "NetworkPolicy", f"hostprep-{component}")
        (rule,) = policy["spec"]["ingress"]
        found: list[dict[str, Any]] | None = rule.get("from")
        return found

    monitoring: list[dict[str, Any]] = [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
        {"namespaceSelector": {"matchLabels": {"metrics": "enabled"}}},
    ]
    assert peers(render(), "agent") == monitoring
    operators = peers(render(), "operator") or []
    assert operators[:2] == monitoring
    # `helm test` asks the operator.
    (test,) = operators[2:]
    assert test["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    assert peers(render("--set-json", "networkPolicy.metricsFrom=[]"), "agent") is None
    assert "metrics=enabled" in notes()
    assert "metrics=enabled" not in notes("--set-json", "networkPolicy.metricsFrom=[]")


def test_a_switched_off_admission_policy_is_warned_of() -> None:
    assert "WARNING: admissionPolicy" in notes("--set", "admissionPolicy.enabled=false")


def test_both_programs_take_the_arguments_that_the_chart_gives() -> None:
    documents = render("--set", "operator.replicas=2")
    for kind, name, command in (
        ("Deployment", "hostprep-operator", operator_commands.commands["run"]),
        ("Job", "hostprep-cleanup", operator_commands.commands["cleanup"]),
        ("DaemonSet", "hostprep-agent", agent_command),
    ):
        (container,) = pod(documents, kind, name)["containers"]
        program = "hostprep" if command is agent_command else "hostprep-operator"
        assert container["command"] == [program, command.name]
        command.make_context(program, list(container["args"]))
