"""Settings, metrics and the command line of the operator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hostprep_operator.cli import cli, main
from hostprep_operator.metrics import Metrics
from hostprep_operator.process import make_settings
from hostprep_operator.run import Health

pytestmark = pytest.mark.unit

OPERATOR = Path(__file__).parents[3] / "operator"


def test_kopf_is_told_to_watch_and_to_post_nothing() -> None:
    settings = make_settings()
    assert settings.scanning.disabled
    assert settings.peering.standalone
    assert not settings.posting.enabled


def test_the_folder_operator_never_shadows_the_standard_library() -> None:
    for name in ("__init__.py", "conftest.py"):
        assert not (OPERATOR / name).exists()
    assert not list(OPERATOR.rglob("test_*.py"))


def test_a_pool_that_is_gone_leaves_no_series() -> None:
    metrics = Metrics()
    metrics.show_pool("kv", {"selected": 3, "ready": 2}, {}, paused=False)
    text = metrics.text().decode()
    assert 'hostprep_operator_pool_nodes{pool="kv",state="ready"} 2.0' in text
    metrics.drop_pool("kv")
    assert 'pool="kv"' not in metrics.text().decode()


def test_the_longest_closed_node_is_told_in_seconds() -> None:
    metrics = Metrics(wall_clock=lambda: 1000.0)
    metrics.node_state("a", "closed", 900.0)
    metrics.node_state("b", "closed", 400.0)
    metrics.node_state("c", "ready", None)
    text = metrics.text().decode()
    assert "hostprep_operator_oldest_closed_seconds 600.0" in text
    assert 'hostprep_operator_nodes{state="closed"} 2.0' in text
    metrics.node_state("b", None, None)
    assert "oldest_closed_seconds 100.0" in metrics.text().decode()


def test_readiness_says_what_is_missing() -> None:
    health = Health()
    assert "sync" in health.ready()
    health.standby = True
    assert health.ready() == ""
    health.standby, health.synced = False, True
    assert health.ready() == ""
    health.silent_s = lambda: 599.0
    assert health.ready() == "", "an API server may be away for a while"
    health.silent_s = lambda: 601.0
    assert "601 s" in health.ready()
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


def test_help_shows_no_mark_of_its_markup(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--help"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "Exit codes: 0 done" in shown
    assert "\\b" not in shown


@pytest.mark.parametrize("command", ["run", "cleanup", "restore"])
def test_without_what_it_needs_it_says_what_to_install(command: str) -> None:
    """`pip install .` brings the program and none of the operator's libraries."""
    script = (
        "import sys; sys.modules['structlog'] = None; "
        f"from hostprep_operator.cli import main; sys.exit(main(['{command}']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "hostprep: hostprep-operator needs structlog; "
        "install it from a clone by: pip install '.[operator]'\n"
    )
