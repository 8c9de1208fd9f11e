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
from tests.cluster.charts import (
    CHART,
    HELMS,
    MONITORING,
    PLATFORMS,
    PROFILES,
    lint,
    notes,
    render,
    render_error,
)

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


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize("profile", PROFILES)
def test_helm_finds_nothing_to_complain_about(profile: str, helm: str) -> None:
    assert "0 chart(s) failed" in lint(*PROFILES[profile], helm=helm)


@pytest.mark.parametrize("values", [(), *PLATFORMS], ids=lambda v: Path(v[-1]).stem if v else "-")
def test_the_oldest_and_the_newest_helm_make_the_same_of_the_chart(values: tuple[str, ...]) -> None:
    everything = (*MONITORING, "--set", "operator.replicas=2,apf.enabled=true")
    new, old = (render(*values, *everything, helm=helm) for helm in HELMS)
    assert new == old


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


def test_each_platform_has_values_that_stand_alone_and_a_page_that_names_them() -> None:
    assert len(PLATFORMS) >= 7
    pages = [path.read_text() for path in (CHART.parents[1] / "docs" / "platforms").glob("*.md")]
    for values in PLATFORMS:
        # Without --set: whoever copies the file changes its registry and nothing else.
        own = ("--set", "image.registry=")
        name = Path(values[-1]).name
        assert sum(name in page for page in pages) >= 2, name
        given = yaml.safe_load(Path(values[-1]).read_text())
        assert given["image"]["registry"], name
        assert "image.registry is not set" in render_error(*values, *own), name


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
    for spec in _restricted_pods(documents):
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
    spec = pod(render("--set", options), "DaemonSet", "hostprep-agent")
    assert "kubelet" not in json.dumps([spec["containers"], spec["volumes"]])


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
        ("agent.extraEnv[0].value=x", "/agent/extraEnv/0"),
        ("agent.updateStrategy.rollingUpdate.maxSurge=most", "maxSurge"),
        ("operator.podSecurityContext.runAsUsr=1", "runAsUsr"),
        ("agent.securityContext.runAsUser=root", "runAsUser"),
        ("agent.seLinuxOptions.typ=spc_t", "typ"),
        ("operator.podLabels.app\\.kubernetes\\.io/name=x", "label app.kubernetes.io/name is"),
        ("commonLabels.helm\\.sh/chart=x", "the label helm.sh/chart is the chart's own"),
        ("operator.podDisruptionBudget.minAvailable=1", "minAvailable"),
        ("operator.probes.liveness.periodSeconds=0", "periodSeconds"),
        ("apf.matchingPrecedence=0", "/apf/matchingPrecedence"),
        ("namespaceOverride=No", "/namespaceOverride"),
        ("openshift.enabled=yes", "/openshift/enabled"),
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


@pytest.mark.parametrize("option", ["taintKey", "admissionPolicy.taintKeys[0]"])
def test_somebody_elses_taint_is_refused_and_why_is_said(option: str) -> None:
    """The operator takes its keys off every ready node: GPU nodes would lose their fence."""
    error = render_error("--set", f"{option}=nvidia.com/gpu")
    assert "nvidia.com/gpu is not a taint of Hostprep's" in error
    assert "must contain hostprep or host-memory, such as example.com/host-memory" in error
    render("--set", f"{option}=example.com/host-memory")


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("agent.extraEnv[0].name=NODE_NAME,agent.extraEnv[0].value=x", "NODE_NAME"),
        ("operator.extraEnv[0].name=POD_NAMESPACE,operator.extraEnv[0].value=x", "POD_NAMESPACE"),
        ("agent.extraEnv[0].name=A,agent.extraEnv[1].name=A", "A"),
    ],
)
def test_no_variable_can_be_given_twice(option: str, name: str, helm: str) -> None:
    """Helm 4 applies server-side, and the API server refuses two of a name."""
    error = render_error("--set", option, helm=helm)
    assert f"extraEnv names {name}, which is there already" in error


@pytest.mark.parametrize("helm", HELMS)
def test_commands_that_run_beside_the_agent_find_its_folders(helm: str) -> None:
    def variables(*options: str) -> dict[str, Any]:
        (agent,) = (o for o in render(*options, helm=helm) if o["kind"] == "DaemonSet")
        (container,) = agent["spec"]["template"]["spec"]["containers"]
        return {variable["name"]: variable.get("value") for variable in container["env"]}

    assert variables() == {"NODE_NAME": None}
    moved = ("--set", "agent.stateDir=/data/state,agent.root=/data/run")
    folders = {"HOSTPREP_ROOT": "/data/run", "HOSTPREP_STATE_DIR": "/data/state"}
    assert variables(*moved) == {"NODE_NAME": None, **folders}
    for name in folders:
        given = ("--set", f"agent.extraEnv[0].name={name},agent.extraEnv[0].value=x")
        assert variables(*given)[name] == "x"
        error = render_error(*moved, *given, helm=helm)
        assert f"extraEnv names {name}, which is there already" in error


def test_ids_can_be_others_and_null_leaves_them_to_the_platform() -> None:
    for option, ids in (
        ("operator.podSecurityContext.runAsUser=1000", (1000, 65532, 65532)),
        ("operator.podSecurityContext.runAsUser=null", (None, 65532, 65532)),
        ("openshift.enabled=true", (None, None, None)),
    ):
        for helm in HELMS:
            documents = render("--set", option, helm=helm)
            for spec in _restricted_pods(documents):
                context = spec["securityContext"]
                found = tuple(context.get(k) for k in ("runAsUser", "runAsGroup", "fsGroup"))
                assert found == ids, (helm, option)
                assert context["runAsNonRoot"] is True
                assert context["seccompProfile"] == {"type": "RuntimeDefault"}


def _restricted_pods(documents: list[Document]) -> list[Document]:
    """Of all pods but the agents' and the one that attaches, which mount the node's folder."""
    workloads = [d for d in documents if d["kind"] in ("Deployment", "Job")]
    specs = [d["spec"]["template"]["spec"] for d in workloads]
    assert len(specs) > 1
    return [*specs, find(documents, "Pod", "hostprep-test")["spec"]]


def test_hooks_may_have_a_context_of_their_own() -> None:
    options = "hooks.podSecurityContext.runAsUser=7,hooks.securityContext.runAsGroup=8"
    documents = render("--set", options)
    assert (
        pod(documents, "Deployment", "hostprep-operator")["securityContext"]["runAsUser"] == 65532
    )
    spec = pod(documents, "Job", "hostprep-cleanup")
    assert spec["securityContext"]["runAsUser"] == 7
    assert spec["securityContext"]["runAsGroup"] == 65532
    (container,) = spec["containers"]
    assert container["securityContext"]["runAsGroup"] == 8
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_every_pod_of_a_hook_has_the_labels_and_annotations_of_hooks() -> None:
    documents = render("--set", "hooks.podLabels.a=b,hooks.podAnnotations.c=d")
    hooks = [d for d in documents if "helm.sh/hook" in d["metadata"].get("annotations", {})]
    pods = [d for d in hooks if d["kind"] == "Pod"]
    pods += [d["spec"]["template"] for d in hooks if d["kind"] == "Job"]
    assert len(pods) == 3
    for found in pods:
        assert found["metadata"]["labels"]["a"] == "b", found["metadata"]
        assert found["metadata"]["annotations"]["c"] == "d", found["metadata"]


def test_openshift_gets_constraints_for_the_agents_and_nobody_else() -> None:
    assert "SecurityContextConstraints" not in kinds(render())
    for mode in ("privileged", "adopt"):
        documents = render("--set", f"openshift.enabled=true,agent.mode={mode}")
        found = find(documents, "SecurityContextConstraints", "hostprep-system-hostprep-agent")
        assert found["users"] == ["system:serviceaccount:hostprep-system:hostprep-agent"]
        assert found["groups"] == []
        agent = pod(documents, "DaemonSet", "hostprep-agent")
        (container,) = agent["containers"]
        asked = container["securityContext"]
        assert found["allowPrivilegedContainer"] == asked["privileged"] == (mode == "privileged")
        assert found["allowHostPID"] == agent["hostPID"]
        assert found["allowedCapabilities"] == asked.get("capabilities", {}).get("add", [])
        assert set(found["volumes"]) >= {
            next(k for k in v if k != "name") for v in agent["volumes"]
        }
        assert asked["readOnlyRootFilesystem"] >= found["readOnlyRootFilesystem"]


def test_the_agents_context_can_be_given_field_by_field() -> None:
    options = "agent.mode=adopt,agent.seLinuxOptions.type=spc_t,agent.securityContext.runAsGroup=5"
    spec = pod(
        render("--set", options, "--set", "agent.podSecurityContext.supplementalGroups={42}"),
        "DaemonSet",
        "hostprep-agent",
    )
    (container,) = spec["containers"]
    context = container["securityContext"]
    assert context["seLinuxOptions"] == {"type": "spc_t"}
    assert (context["runAsUser"], context["runAsGroup"]) == (0, 5)
    assert context["capabilities"]["drop"] == ["ALL"]
    assert spec["securityContext"] == {"supplementalGroups": [42]}


def test_the_pod_that_attaches_has_the_pools_group_and_no_other_right() -> None:
    def spec(*options: str) -> Document:
        found: Document = find(render(*options), "Pod", "hostprep-test-attach")["spec"]
        return found

    assert "volumes" not in spec()
    attaching = spec("--set", "test.attach.pool=kv,test.attach.gid=4242,agent.root=/run/x")
    assert attaching["securityContext"]["supplementalGroups"] == [4242]
    assert attaching["securityContext"]["runAsNonRoot"] is True
    assert attaching["automountServiceAccountToken"] is False
    (container,) = attaching["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    root = {"name": "root", "mountPath": "/run/x", "mountPropagation": "HostToContainer"}
    assert root in container["volumeMounts"]
    openshift = render("--set", "openshift.enabled=true,test.attach.pool=kv")
    account = find(openshift, "Pod", "hostprep-test-attach")["spec"]["serviceAccountName"]
    constraints = find(openshift, "SecurityContextConstraints", "hostprep-system-hostprep-test")
    assert constraints["users"] == [f"system:serviceaccount:hostprep-system:{account}"]
    assert constraints["allowPrivilegedContainer"] is False


def test_agents_stay_off_nodes_that_are_no_machines() -> None:
    spec = pod(render(), "DaemonSet", "hostprep-agent")
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    assert {(e["key"], e["operator"], *e["values"]) for e in term["matchExpressions"]} == {
        ("eks.amazonaws.com/compute-type", "NotIn", "fargate"),
        ("type", "NotIn", "virtual-kubelet"),
    }


def test_agents_may_surge_and_kubernetes_rule_for_it_is_told() -> None:
    strategy = "agent.updateStrategy.rollingUpdate"
    error = render_error("--set", f"{strategy}.maxSurge=1")
    assert "set maxUnavailable to 0 to surge" in error
    documents = render("--set", f"{strategy}.maxSurge=10%,{strategy}.maxUnavailable=0")
    update = find(documents, "DaemonSet", "hostprep-agent")["spec"]["updateStrategy"]
    assert update["rollingUpdate"] == {"maxSurge": "10%", "maxUnavailable": 0}
    documents = render("--set", "agent.updateStrategy.type=OnDelete")
    update = find(documents, "DaemonSet", "hostprep-agent")["spec"]["updateStrategy"]
    assert update == {"type": "OnDelete"}


def test_all_that_has_a_namespace_goes_where_the_override_says() -> None:
    documents = render("--set", "namespaceOverride=elsewhere", *MONITORING)
    namespaces = {d["metadata"].get("namespace") for d in documents}
    assert namespaces == {"elsewhere", "default", None}
    assert "hostprep-system" not in json.dumps(documents)


def test_labels_and_annotations_reach_their_pods_and_accounts() -> None:
    documents = render(
        *("--set", "operator.podLabels.a=1x,agent.podLabels.a=2x,commonLabels.a=0x"),
        *("--set", "operator.serviceAccount.annotations.b=1x,agent.podAnnotations.c=2x"),
    )
    templates = {
        kind: find(documents, kind, name)["spec"]["template"]["metadata"]
        for kind, name in (("Deployment", "hostprep-operator"), ("DaemonSet", "hostprep-agent"))
    }
    assert templates["Deployment"]["labels"]["a"] == "1x"
    assert templates["DaemonSet"]["labels"]["a"] == "2x"
    assert templates["DaemonSet"]["annotations"] == {"c": "2x"}
    account = find(documents, "ServiceAccount", "hostprep-operator")["metadata"]
    assert account["annotations"] == {"b": "1x"}
    assert account["labels"]["a"] == "0x"


def test_spread_budget_and_probes_are_what_values_say() -> None:
    spread = '[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"DoNotSchedule"}]'
    documents = render(
        *("--set-json", f"operator.topologySpreadConstraints={spread}"),
        *("--set", "operator.podDisruptionBudget.enabled=true"),
        *("--set", "operator.podDisruptionBudget.maxUnavailable=50%"),
        *("--set", "agent.probes.startup.failureThreshold=900"),
    )
    spec = pod(documents, "Deployment", "hostprep-operator")
    assert spec["topologySpreadConstraints"] == json.loads(spread)
    budget = find(documents, "PodDisruptionBudget", "hostprep-operator")["spec"]
    assert budget["maxUnavailable"] == "50%"
    (agent,) = pod(documents, "DaemonSet", "hostprep-agent")["containers"]
    assert agent["startupProbe"]["failureThreshold"] == 900
    assert agent["startupProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert "PodDisruptionBudget" not in kinds(
        render("--set", "operator.replicas=2,operator.podDisruptionBudget.enabled=false")
    )


def test_objects_of_ones_own_are_templates() -> None:
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "{{ .Release.Name }}-x"},
    }
    text = json.dumps(config).replace("-x", "-y")
    documents = render("--set-json", f"extraObjects={json.dumps([config, text])}")
    assert find(documents, "ConfigMap", "hostprep-x")
    assert find(documents, "ConfigMap", "hostprep-y")


def test_agents_have_seats_of_their_own_when_asked_for() -> None:
    assert "FlowSchema" not in kinds(render())
    documents = render("--set", "apf.enabled=true,apf.agents.nominalConcurrencyShares=3")
    level = find(documents, "PriorityLevelConfiguration", "hostprep-agents")["spec"]["limited"]
    assert level["nominalConcurrencyShares"] == 3
    schema = find(documents, "FlowSchema", "hostprep-agents")["spec"]
    assert schema["priorityLevelConfiguration"]["name"] == "hostprep-agents"
    (rule,) = schema["rules"]
    account = find(documents, "ServiceAccount", "hostprep-agent")["metadata"]
    assert rule["subjects"][0]["serviceAccount"] == {k: account[k] for k in ("name", "namespace")}


def test_pools_are_protected_unless_that_is_switched_off() -> None:
    def policies(*options: str) -> set[str]:
        documents = render(*options)
        found = [d for d in documents if d["kind"] == "ValidatingAdmissionPolicyBinding"]
        return {d["spec"]["policyName"] for d in found}

    assert "hostprep-deletion-protection" in policies()
    for switch in ("deletionProtection.enabled", "enabled"):
        left = policies("--set", f"admissionPolicy.{switch}=false")
        assert "hostprep-deletion-protection" not in left


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
