"""What `make cluster` says and judges, without a cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from hostprep.errors import NotReadyError
from testbed.chart import is_rolled_out
from testbed.playground import LEAVE, how_to_use, how_to_use_a_node, open_console, split_at_leave

pytestmark = pytest.mark.unit
_ROOT = Path(__file__).parents[3]


def _workload(status: dict[str, int], replicas: int = 2) -> dict[str, Any]:
    return {"metadata": {"generation": 3}, "spec": {"replicas": replicas}, "status": status}


@pytest.mark.parametrize(
    ("status", "there"),
    [
        ({}, False),
        ({"observedGeneration": 3, "updatedReplicas": 2, "availableReplicas": 2}, True),
        ({"observedGeneration": 2, "updatedReplicas": 2, "availableReplicas": 2}, False),
        ({"observedGeneration": 3, "updatedReplicas": 1, "availableReplicas": 2}, False),
        ({"observedGeneration": 3, "updatedReplicas": 2, "availableReplicas": 1}, False),
        (
            {
                "observedGeneration": 3,
                "updatedReplicas": 2,
                "availableReplicas": 2,
                "replicas": 3,
            },
            False,
        ),
        ({"observedGeneration": 3, "desiredNumberScheduled": 0}, False),
        (
            {
                "observedGeneration": 3,
                "desiredNumberScheduled": 1,
                "updatedNumberScheduled": 1,
                "numberAvailable": 1,
            },
            True,
        ),
        (
            {
                "observedGeneration": 3,
                "desiredNumberScheduled": 1,
                "updatedNumberScheduled": 0,
                "numberAvailable": 1,
            },
            False,
        ),
    ],
)
def test_the_chart_is_there_when_all_pods_of_the_present_version_are(
    status: dict[str, int], there: bool
) -> None:
    assert is_rolled_out(_workload(status)) is there


@pytest.mark.parametrize(
    ("typed", "sent", "leaves"),
    [(b"ls\r", b"ls\r", False), (b"ls\r" + LEAVE + b"x", b"ls\r", True), (LEAVE, b"", True)],
)
def test_only_one_key_leaves_the_console(typed: bytes, sent: bytes, leaves: bool) -> None:
    assert split_at_leave(typed) == (sent, leaves)


def test_what_is_piped_into_the_console_arrives_and_its_end_leaves(memory_folder: Path) -> None:
    path = memory_folder / "console"
    heard = bytearray()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                while data := connection.recv(100):
                    heard.extend(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        program = "import sys, pathlib; from testbed.playground import open_console; "
        program += "open_console(pathlib.Path(sys.argv[1]))"
        person = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            input=b"ls\r",
            capture_output=True,
            timeout=60,
            check=False,
            cwd=_ROOT,
        )
        thread.join(timeout=10)
    assert person.returncode == 0, person.stderr
    assert bytes(heard) == b"ls\r"


def test_without_a_node_the_shell_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match="make cluster NODE=1"):
        open_console(tmp_path / "nobody")
    # Left behind by a machine that was killed: a socket that nobody listens on.
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    with pytest.raises(NotReadyError):
        open_console(tmp_path / "dead")


def test_every_file_that_a_person_is_told_to_use_is_there() -> None:
    for text in (how_to_use(Path("/k"), Path("/t")), how_to_use_a_node(Path("/k"), Path("/t"))):
        files = [
            word for word in text.split() if word.startswith(("examples/", "docs/", "charts/"))
        ]
        assert files
        for file in files:
            path = _ROOT / file.rstrip(".")
            assert path.exists(), file
            if path.suffix == ".yaml":
                assert list(yaml.safe_load_all(path.read_text()))


def test_a_person_is_told_which_options_do_not_go_together() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "KUBERNETES"}
    for options, why in (
        (["--node", "--bare"], "neither"),
        (["--node", "--kubernetes", "oldest"], "API server of its kubelet"),
        (["--shell"], "needs --node"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "testbed", "up", *options],
            capture_output=True,
            text=True,
            check=False,
            cwd=_ROOT,
            env=environ,
        )
        assert done.returncode == 2
        assert why in done.stderr
