"""examples/engines: a Deployment for each engine, with the least of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.engines.catalogue import INTEGRATIONS, integration_of
from hostprep.engines.launching import EngineStart, launcher_of
from testbed.engine_pods import GID

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[3] / "examples" / "engines"
FILES = sorted(EXAMPLES.glob("*.yaml"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture
def deployment(path: Path) -> dict[str, Any]:
    documents = [found for found in yaml.safe_load_all(path.read_text()) if found]
    (found,) = (document for document in documents if document["kind"] == "Deployment")
    return dict(found)


@pytest.fixture
def spec(deployment: dict[str, Any]) -> dict[str, Any]:
    return dict(deployment["spec"]["template"]["spec"])


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec["initContainers"], *spec["containers"]]


def _words(container: dict[str, Any]) -> list[str]:
    return [*container.get("command", ()), *container.get("args", ())]


def test_every_engine_has_one() -> None:
    stems = {path.stem for path in FILES}
    assert {"vllm", "vllm-offloading", "lmcache", "mooncake", "sglang", "trtllm"} <= stems
    assert stems <= {each.name for each in INTEGRATIONS}


def test_they_name_engines_that_exec_knows(path: Path, spec: dict[str, Any]) -> None:
    words = [word for container in _containers(spec) for word in _words(container)]
    named = {word.partition("=")[2] for word in words if word.startswith("--engine=")}
    assert named <= {each.name for each in INTEGRATIONS}
    assert named == {"lmcache" if path.stem == "trtllm" else path.stem}


def test_the_commands_are_such_as_exec_completes(spec: dict[str, Any]) -> None:
    for container in _containers(spec):
        words = _words(container)
        names = [word.partition("=")[2] for word in words if word.startswith("--engine=")]
        for name in names:
            command = tuple(words[words.index("--") + 1 :])
            integration = integration_of(name)
            launcher = launcher_of(integration)
            assert launcher.requirements(EngineStart(integration, command, {})).count == 1


def test_nothing_surges(deployment: dict[str, Any]) -> None:
    rolling = deployment["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxSurge": 0, "maxUnavailable": 1}


def test_no_right_but_the_pools_group(spec: dict[str, Any]) -> None:
    pod = spec["securityContext"]
    assert (pod["runAsNonRoot"], pod["runAsUser"]) == (True, 1000)
    assert pod["supplementalGroups"] == [GID]
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostPID", "hostIPC", "hostNetwork", "tolerations"} & set(spec)
    for container in _containers(spec):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_it_waits_for_the_memory_first_and_in_line(spec: dict[str, Any]) -> None:
    first = spec["initContainers"][0]
    assert "hostprep.pyz wait kv" in first["args"][0]
    assert all(mount["readOnly"] for mount in first["volumeMounts"])
    claimers = [c for c in _containers(spec) if "exec kv" in " ".join(_words(c))]
    assert len(claimers) == 1
    assert any(word.startswith("--wait=") for word in _words(claimers[0]))
    assert spec["nodeSelector"] == {"pool.hostprep.dev/kv": "true"}


def test_mounts_are_declared_and_those_made_later_reach_it(spec: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in spec["volumes"]}
    for container in _containers(spec):
        for mount in container["volumeMounts"]:
            assert mount["name"] in volumes
            if mount["name"] in ("hostprep", "host-memory"):
                assert mount["mountPropagation"] == "HostToContainer"


def test_scale_down_may_move_it(deployment: dict[str, Any], spec: dict[str, Any]) -> None:
    metadata = deployment["spec"]["template"]["metadata"]
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    local = [v["name"] for v in spec["volumes"] if "hostPath" in v or "emptyDir" in v]
    assert sorted(metadata["annotations"][key].split(",")) == sorted(local)
