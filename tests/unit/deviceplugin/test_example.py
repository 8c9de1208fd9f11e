"""examples/kubernetes/engine-device-plugin.yaml says what docs/attach-device-plugin.md says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.api.pool_resource import load_pools
from hostprep.deviceplugin.devices import resource_name
from testbed.engine_pods import EXAMPLES, documents

pytestmark = pytest.mark.unit

NAME = "engine-device-plugin.yaml"
DOCS = Path(__file__).parents[3] / "docs" / "attach-device-plugin.md"
NAMESPACE, POOL, DEPLOYMENT = documents(NAME)
SPEC: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]


def test_the_pool_is_kubelets_and_has_a_group() -> None:
    (pool,) = load_pools(yaml.safe_dump(POOL), source=NAME)
    assert POOL["spec"]["attach"] == {"mode": "DevicePlugin"}
    assert SPEC["securityContext"]["supplementalGroups"] == [pool.gid]


def test_the_engine_asks_for_a_region_of_that_pool() -> None:
    (engine,) = SPEC["containers"]
    assert engine["resources"]["limits"][resource_name(POOL["metadata"]["name"])] == 1
    assert f"exec {POOL['metadata']['name']}" in " ".join(engine["command"])
    assert any(word.startswith("--wait=") for word in engine["command"]), "kubelet is no scrubber"


def test_nothing_of_the_host_is_mounted_where_restricted_is_enforced() -> None:
    assert NAMESPACE["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert DEPLOYMENT["metadata"]["namespace"] == NAMESPACE["metadata"]["name"]
    assert "hostPath" not in json.dumps(SPEC)
    (engine,) = SPEC["containers"]
    assert engine["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_a_roll_out_never_needs_more_regions_than_there_are() -> None:
    assert DEPLOYMENT["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_what_the_page_quotes_is_in_the_file() -> None:
    text = (EXAMPLES / NAME).read_text()
    quoted = re.findall(
        rf"```yaml\n# examples/kubernetes/{NAME}\n(.*?)```", DOCS.read_text(), re.DOTALL
    )
    assert len(quoted) == 3
    for lines in quoted:
        assert lines in text
