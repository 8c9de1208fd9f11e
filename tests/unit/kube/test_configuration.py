"""Which configuration of the API server is taken, and what is said of one that is none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hostprep.errors import BadInputError
from hostprep.kube.client import KubeClient
from hostprep.kube.configuration import load_configuration

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


def _write(path: Path, server: str) -> str:
    cluster = {"name": "c", "cluster": {"server": server}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    config = {"current-context": "x", "clusters": [cluster], "contexts": [context], "users": users}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(config))
    return str(path)


def _server(kubeconfig: str | None = None) -> str | None:
    configuration = asyncio.run(load_configuration(kubeconfig))
    return None if configuration is None else str(configuration.host)


def test_the_file_given_comes_first_then_the_environment_then_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _server() is None
    _write(tmp_path / ".kube" / "config", "http://home")
    assert _server() == "http://home"
    monkeypatch.setenv("KUBECONFIG", _write(tmp_path / "named", "http://named"))
    assert _server() == "http://named"
    assert _server(_write(tmp_path / "given", "http://given")) == "http://given"


def test_a_pod_uses_what_it_is_given_unless_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    _write(tmp_path / ".kube" / "config", "http://home")
    with pytest.raises(BadInputError, match="configuration of this pod cannot be used"):
        _server()
    monkeypatch.setenv("KUBECONFIG", _write(tmp_path / "named", "http://named"))
    assert _server() == "http://named"


def test_a_client_that_needs_an_api_server_says_where_to_name_one() -> None:
    with pytest.raises(BadInputError, match="--kubeconfig") as caught:
        asyncio.run(KubeClient.connect(None, name="test"))
    assert caught.value.reason == "NoKubeconfig"
