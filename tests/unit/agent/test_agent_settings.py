"""What the agent is told at its start: refused with a sentence, before anything happens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hostprep.agent.instance import lock_state_dir
from hostprep.agent.settings import Settings
from hostprep.errors import BadInputError
from hostprep.node.observe import HostRoot
from testbed.agent_process import run_agent
from tests.support import host_trees

pytestmark = pytest.mark.unit


def _settings(tmp_path: Path, **changes: Any) -> Settings:
    fields: dict[str, Any] = {
        "node_name": "worker-1",
        "root": str(tmp_path / "root"),
        "state_dir": str(tmp_path / "state"),
        "allow_cgroup_v1": True,
    }
    return Settings(**(fields | changes))


@pytest.mark.parametrize("name", ["a", "ip-10-0-0-1.ec2.internal", "a" * 63, ".".join(["a"] * 127)])
def test_names_of_nodes_are_taken(tmp_path: Path, name: str) -> None:
    assert _settings(tmp_path, node_name=name).check()


@pytest.mark.parametrize("name", ["", "Worker", "a_b", "-a", "a..b", "a" * 254, "a/b", "a\n"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInputError, match="node"):
        _settings(tmp_path, node_name=name).check()


def test_cgroup_v1_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    host = HostRoot(host_trees.small(tmp_path))

    with pytest.raises(BadInputError, match="--allow-cgroup-v1") as caught:
        _settings(tmp_path, host=host, allow_cgroup_v1=False).check()
    assert caught.value.reason == "CgroupV1"
    assert _settings(tmp_path, host=host, allow_cgroup_v1=True).check()


def test_cgroup_v2_needs_no_leave(tmp_path: Path) -> None:
    host = HostRoot(host_trees.two_socket_8gpu(tmp_path))
    assert _settings(tmp_path, host=host, allow_cgroup_v1=False).check()


def test_a_root_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    for root in ("relative", str(tmp_path / "link")):
        with pytest.raises(BadInputError):
            _settings(tmp_path, root=root).check()


def test_only_one_agent_works_with_a_state_folder(tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    settings.check()
    first = lock_state_dir(settings.state_dir)
    try:
        with pytest.raises(BadInputError, match=f"process {os.getpid()}"):
            lock_state_dir(settings.state_dir)
        # Who is refused leaves the name of who works.
        Path(settings.state_dir, "agent.lock").write_text("4242\n")
        with pytest.raises(BadInputError, match="process 4242"):
            lock_state_dir(settings.state_dir)
    finally:
        os.close(first)
    os.close(lock_state_dir(settings.state_dir))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "which node is this?"),
        (("--node-name", "Bad_Name"), "not a node's name"),
        (("--node-name", "a", "--listen", "nowhere"), "--listen"),
        (("--node-name", "a", "--allow-cgroup-v1"), "there is no API server to ask"),
        (("--node-name", "a", "--allow-cgroup-v1", "--kubeconfig", "/none"), "/none"),
        (("--node-name", "a", "--root", "relative"), "absolute"),
        (("--node-name", "a", "--kubelet-dir", "kubelet"), "absolute"),
        (("--node-name", "a", "--kubelet-dir", "/" + "k" * 90), "too long"),
        (("--node-name", "a", "--verify-interval", "0"), "0.1"),
        (("--node-name", "a", "--verify-interval", "nan"), "not a number"),
    ],
)
def test_bad_input_ends_it_at_once_with_a_sentence(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    done = run_agent(str(tmp_path / "root"), tmp_path / "state", *options)

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "does not exist"),
        ("junk: [", "is not YAML (line 1, column 8)"),
        ("", "is empty, or no kubeconfig at all"),
        ("kind: Config", "has no current-context"),
        ("current-context: here", "cannot be used: "),
    ],
)
def test_a_kubeconfig_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, text: str | None, said: str
) -> None:
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    options = ("--node-name", "a", "--allow-cgroup-v1", "--kubeconfig", str(path))

    done = run_agent(str(tmp_path / "root"), tmp_path / "state", *options)

    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"kubeconfig {path} {said}" in done.stderr
    assert done.stderr.endswith(
        "; give one that works with kubectl by --kubeconfig or KUBECONFIG\n"
    )
