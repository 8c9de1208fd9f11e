"""The manifests of examples/kubernetes say what their comments and docs/attach-hostpath.md say."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.api.pool_resource import load_pools
from testbed.engine_pods import (
    EXAMPLES,
    GID,
    HOST_PATH_MANIFESTS,
    documents,
    pod_specs,
    renamed_pool,
)

pytestmark = pytest.mark.unit

DOCS = Path(__file__).parents[3] / "docs" / "attach-hostpath.md"
ENGINES = sorted(
    path.name
    for path in EXAMPLES.glob("engine*.yaml")
    if path.name != "engine-scripts.yaml" and "device-plugin" not in path.name
)


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


@pytest.fixture(params=ENGINES)
def example(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def spec(example: str) -> dict[str, Any]:
    (found,) = pod_specs(documents(example))
    return found


def test_all_of_them_are_looked_at() -> None:
    assert {"engine.yaml", "engine-userns.yaml", "engine-containers.yaml"} <= set(ENGINES)


def test_an_engine_has_no_right_but_the_pools_group(spec: dict[str, Any]) -> None:
    pod = spec["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] == 1000
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["supplementalGroups"] == [GID]
    assert spec["automountServiceAccountToken"] is False
    assert not {"hostPID", "hostIPC", "hostNetwork", "tolerations"} & set(spec)
    for container in _containers(spec):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_it_asks_for_no_huge_pages_of_its_own_and_little_memory(spec: dict[str, Any]) -> None:
    for container in _containers(spec):
        resources = container["resources"]
        assert set(resources["limits"]) == {"memory"}
        assert set(resources["requests"]) == {"cpu", "memory"}
        assert resources["limits"]["memory"] in ("128Mi", "256Mi")


def test_it_is_selected_by_the_static_label(spec: dict[str, Any]) -> None:
    assert spec["nodeSelector"] == {"pool.hostprep.dev/kv": "true"}


def test_mounts_made_later_reach_it(spec: dict[str, Any]) -> None:
    host = {volume["name"] for volume in spec["volumes"] if "hostPath" in volume}
    for container in _containers(spec):
        mounts = [mount for mount in container["volumeMounts"] if mount["name"] in host]
        assert mounts
        assert {mount["mountPropagation"] for mount in mounts} == {"HostToContainer"}


@pytest.mark.parametrize("path", HOST_PATH_MANIFESTS, ids=lambda path: path.stem)
def test_only_the_pools_folder_is_writable(path: Path) -> None:
    """And the folder of all pools never is, whoever the engine runs as."""
    pods = [found for found in documents(path) if found["kind"] in ("Pod", "Deployment")]
    (spec,) = pod_specs(pods)
    paths = {v["name"]: v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v}
    writable = set()
    for container in _containers(spec):
        mounts = [mount for mount in container.get("volumeMounts", ()) if mount["name"] in paths]
        assert [paths[mount["name"]] for mount in mounts] == [m["mountPath"] for m in mounts]
        assert "recursiveReadOnly" not in str(mounts)
        assert [mount["mountPath"] for mount in mounts][:1] in ([], ["/run/hostprep"])
        writable |= {mount["mountPath"] for mount in mounts if not mount.get("readOnly")}
    assert writable - {"/run/hostprep/kv/mem"} == {"/run/hostprep/kv"}


def test_kubelet_waits_for_no_path_of_ours(spec: dict[str, Any]) -> None:
    """Kubelet tries a missing path again after up to two minutes: `wait` is there in time."""
    for volume in spec["volumes"]:
        path = volume.get("hostPath", {"type": "DirectoryOrCreate", "path": "/run/hostprep"})
        if path["path"] == "/run/hostprep":
            assert path["type"] == "DirectoryOrCreate"
        else:
            assert "type" not in path


def test_the_first_container_waits_for_the_memory(spec: dict[str, Any]) -> None:
    (first,) = spec["initContainers"]
    script = first["args"][0]
    assert script.startswith("until [ -e /run/hostprep/hostprep.pyz ]")
    assert "hostprep.pyz wait kv" in script
    assert all(mount["readOnly"] for mount in first["volumeMounts"])


def test_only_the_users_namespace_maps_the_regions_apart(example: str, spec: Any) -> None:
    apart = [volume for volume in spec["volumes"] if volume["name"] == "regions"]
    assert bool(apart) == (spec.get("hostUsers") is False) == (example == "engine-userns.yaml")
    assert ("--handoff-only" in str(spec["initContainers"])) == bool(apart)


def test_scale_down_may_move_it(example: str) -> None:
    (document,) = documents(example)
    metadata = document["spec"].get("template", document)["metadata"]
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    (spec,) = pod_specs([document])
    local = [v["name"] for v in spec["volumes"] if "hostPath" in v or "emptyDir" in v]
    assert sorted(metadata["annotations"][key].split(",")) == sorted(local)


def test_the_token_of_what_is_kept_is_read_by_the_engine_alone() -> None:
    (spec,) = pod_specs(documents("engine-warm.yaml"))
    (secret,) = (volume["secret"] for volume in spec["volumes"] if volume["name"] == "owner")
    assert secret["defaultMode"] == 0o400
    # Its files are root's: without a group of the pod's the engine could not read them.
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
    engine = spec["containers"][0]
    (mount,) = (mount for mount in engine["volumeMounts"] if mount["name"] == "owner")
    assert mount["readOnly"] is True
    (file,) = (word for word in engine["command"] if word.startswith("--owner-file="))
    assert file == f"--owner-file={mount['mountPath']}/token"
    assert not any(mount["name"] == "owner" for mount in spec["initContainers"][0]["volumeMounts"])


@pytest.mark.parametrize("name", ["engine.yaml", "engine-warm.yaml"])
def test_deployments_never_surge(name: str) -> None:
    (deployment,) = documents(name)
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_the_pool_is_one_for_the_group_of_the_engines() -> None:
    (pool,) = load_pools((EXAMPLES / "pool.yaml").read_text(), source="pool.yaml")
    assert (pool.name, pool.gid) == ("kv", GID)


def test_the_engines_are_python_3_9() -> None:
    (scripts,) = documents("engine-scripts.yaml")
    for name, text in scripts["data"].items():
        ast.parse(text, name, feature_version=(3, 9))


def test_commands_name_scripts_that_are_there(spec: dict[str, Any]) -> None:
    (scripts,) = documents("engine-scripts.yaml")
    named = re.findall(r"/opt/engine/(\w+\.py)", str(spec["containers"]))
    assert set(named) <= set(scripts["data"])


def test_another_pool_is_a_matter_of_its_name(example: str) -> None:
    text = yaml.safe_dump_all(renamed_pool(documents(example), "chat"))
    assert "chat" in text
    assert not re.search(r"\bkv\b(?!\.bin)", text), text


@pytest.mark.parametrize(
    "block", re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
)
def test_the_page_shows_what_the_manifests_say(block: str) -> None:
    """Every line of an excerpt is a line of the file that its first line names."""
    name, *lines = block.splitlines()
    file = (EXAMPLES / name.removeprefix("# examples/kubernetes/")).read_text()
    have = {_plain(line) for line in file.splitlines()}
    assert [line for line in lines if _plain(line) not in have] == []


def _plain(line: str) -> str:
    return line.partition(" #")[0].strip()
