"""Settings, addresses, errors, metrics and the command line of the operator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hostprep.errors import BadInputError
from hostprep_operator.api_errors import ConflictError, RefusedError, TooManyError
from hostprep_operator.cli import main
from hostprep_operator.health import Health, parse_listen
from hostprep_operator.kube import NO_SUCH_RESOURCE, _error_of
from hostprep_operator.metrics import Metrics
from hostprep_operator.settings import make_settings

pytestmark = pytest.mark.unit

OPERATOR = Path(__file__).parents[3] / "operator"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(":9809", ("", 9809)), ("127.0.0.1:0", ("127.0.0.1", 0)), ("[::1]:80", ("::1", 80))],
)
def test_listen_addresses_are_read(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize("text", ["", "9809", ":x", ":70000", "a b:1", "host:"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadInputError, match="no address"):
        parse_listen(text)


def test_a_missing_object_is_an_answer_and_a_missing_resource_is_an_error() -> None:
    missing = b'{"kind":"Status","reason":"NotFound","details":{"name":"kv"}}'
    assert _error_of(404, "", missing, "GET x") is None
    error = _error_of(404, "", b"404 page not found\n", "GET x")
    assert isinstance(error, RefusedError)
    assert error.reason == NO_SUCH_RESOURCE


def test_errors_are_told_apart() -> None:
    assert isinstance(_error_of(409, "", b"{}", "PATCH x"), ConflictError)
    error = _error_of(429, "7", b"{}", "PATCH x")
    assert isinstance(error, TooManyError)
    assert error.retry_after_s == 7
    refused = _error_of(422, "", b'{"message":"spec.x: Invalid"}', "PATCH x")
    assert isinstance(refused, RefusedError)
    assert "spec.x: Invalid" in str(refused)


def test_kopf_is_told_to_persist_nothing_and_to_keep_little() -> None:
    settings = make_settings(agent_selector="a=b")
    assert settings.scanning.disabled
    assert settings.peering.standalone
    assert not settings.posting.enabled
    assert settings.queueing.idle_timeout <= 0.1
    assert settings.queueing.worker_limit is None, "with idle_timeout it would stall watches"
    assert settings.watching.chunk_size
    storage = settings.persistence.diffbase_storage
    assert storage.fetch(body={}) is None  # type: ignore[arg-type]
    assert storage.build(body={"spec": {"a": 1}}) == {}  # type: ignore[arg-type]


def test_the_folder_operator_never_shadows_the_standard_library() -> None:
    for name in ("__init__.py", "conftest.py"):
        assert not (OPERATOR / name).exists()
    assert not list(OPERATOR.rglob("test_*.py"))


def test_a_pool_that_is_gone_leaves_no_series() -> None:
    metrics = Metrics()
    metrics.pool_counts("kv", {"selected": 3, "ready": 2})
    text = metrics.exposition().decode()
    assert 'hostprep_operator_pool_nodes{pool="kv",state="ready"} 2.0' in text
    metrics.drop_pool("kv")
    assert 'pool="kv"' not in metrics.exposition().decode()


def test_the_longest_closed_node_is_told_in_seconds() -> None:
    metrics = Metrics(wall_clock=lambda: 1000.0)
    metrics.node_state("a", "closed", 900.0)
    metrics.node_state("b", "closed", 400.0)
    metrics.node_state("c", "ready", None)
    text = metrics.exposition().decode()
    assert "hostprep_operator_oldest_closed_seconds 600.0" in text
    assert 'hostprep_operator_nodes{state="closed"} 2.0' in text
    metrics.node_state("b", None, None)
    assert "oldest_closed_seconds 100.0" in metrics.exposition().decode()


def test_readiness_says_what_is_missing() -> None:
    health = Health()
    assert "sync" in health.ready()
    health.standby = True
    assert health.ready() == ""
    health.standby, health.synced = False, True
    assert health.ready() == ""
    health.watching = False
    assert "watches" in health.ready()
    health.stopping = True
    assert health.ready() == "stopping"


def test_a_key_that_no_worker_takes_for_minutes_makes_the_process_be_restarted() -> None:
    health = Health()
    assert health.alive() == ""
    health.oldest_key_s = lambda: 301.0
    assert "301 s" in health.alive()


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--agent-grace=-1"],
        ["run", "--workers=0"],
        ["run", "--agent-liveness=maybe"],
        ["run", "--listen=nowhere"],
        ["run", "--kubeconfig=/does/not/exist"],
        ["cleanup", "--timeout=soon"],
        ["cleanup", "--kubeconfig=/does/not/exist"],
        ["cleanup", "--timeout=nan"],
        ["run", "--agent-grace=nan"],
        ["fly"],
    ],
)
def test_bad_input_is_refused_with_a_sentence(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.strip()) > 20


def test_a_kubeconfig_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, text in enumerate(("[]", "{", "a: 1", "clusters: []", "\x00")):
        path = tmp_path / str(number)
        path.write_text(text)
        assert main(["cleanup", f"--kubeconfig={path}"]) == 2
    assert "--kubeconfig" in capsys.readouterr().err


def test_cleanup_takes_nothing_away_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config"
    cluster = {"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    config = {"current-context": "x", "clusters": [cluster], "contexts": [context], "users": users}
    path.write_text(json.dumps(config))
    assert main(["cleanup", f"--kubeconfig={path}"]) == 2
    said = capsys.readouterr().err
    assert "127.0.0.1:9" in said
    assert "--yes" in said


def test_options_come_from_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOSTPREP_OPERATOR_WORKERS", "0")
    assert main(["run"]) == 2
    assert "HOSTPREP_OPERATOR_WORKERS" in capsys.readouterr().err


def test_the_version_is_printed_without_a_cluster() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hostprep_operator", "version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.strip()
