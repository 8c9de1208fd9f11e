"""`kubectl hostprep doctor NODE`: the plugin by the real kubectl, kubelet and agent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from testbed.binaries import find
from testbed.control_plane import ControlPlane
from testbed.node import NODE

pytestmark = pytest.mark.node
JsonObject = dict[str, Any]
PLUGIN = Path(__file__).parents[2] / "deploy" / "krew" / "kubectl_hostprep.py"


def _plugin(
    cluster: ControlPlane, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    (folder / "kubectl-hostprep").unlink(missing_ok=True)
    (folder / "kubectl-hostprep").symlink_to(PLUGIN)
    kubectl = find("kubectl")
    path = f"{folder}:{kubectl.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [str(kubectl), "hostprep", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        env={"PATH": path, "HOME": str(folder), "KUBECONFIG": str(cluster.kubeconfig)},
    )


def test_doctor_runs_in_the_agent_of_that_node_and_its_exit_code_is_the_plugins(
    cluster: ControlPlane, kv: JsonObject, tmp_path: Path
) -> None:
    done = _plugin(cluster, tmp_path, "doctor", NODE, "-o", "json")
    findings = json.loads(done.stdout)["findings"]
    assert findings, done.stderr
    errors = [finding for finding in findings if finding["severity"] == "error"]
    assert done.returncode == (1 if errors else 0), done.stderr


def test_status_shows_what_the_real_agent_reports(
    cluster: ControlPlane, kv: JsonObject, tmp_path: Path
) -> None:
    done = _plugin(cluster, tmp_path, "status", "kv", "-o", "json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["nodes"]
    assert (row["node"], row["phase"], row["regionsLeased"]) == (NODE, "Ready", 0)
    assert row["heldBytes"] == 128 << 20
