"""Blocks that are kept, in vLLM's configuration: what may be said, and what contradicts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hostprep.engines import memory
from hostprep.engines.catalogue import integration_of
from hostprep.engines.launching import EngineStart, Options
from hostprep.engines.vllm import launch
from hostprep.engines.vllm.settings import Settings
from hostprep.errors import BadInputError
from hostprep.slots import Directory
from tests.unit.engines.leases import leases_of

pytestmark = pytest.mark.unit

_SERVE = ("vllm", "serve", "m")


@pytest.fixture(autouse=True)
def _not_under_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTPREP_WARM", raising=False)


def _read(**config: Any) -> Settings:
    named = {f"hostprep.{key}": value for key, value in config.items()}
    return Settings.read(named, can_have_slots=True)


def test_nothing_is_kept_unless_asked_for() -> None:
    assert _read().warm is None
    assert _read(warm=False).warm is None


def test_exec_says_under_which_name_and_that_takes_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTPREP_WARM", "chat")
    assert _read().warm == "chat"
    assert _read().slots
    assert _read(warm=True).warm == "chat"
    assert _read(warm="chat").warm == "chat"
    with pytest.raises(BadInputError, match="kept as 'chat'"):
        _read(warm=False)  # the region comes back with bytes that nobody would void


def test_an_engine_that_claims_by_itself_gives_a_name_and_a_file() -> None:
    assert _read(warm="chat", owner_file="/run/owner").warm == "chat"


@pytest.mark.parametrize(
    "config",
    [
        {"warm": True},
        {"warm": "chat"},
        {"warm": "Not A Label", "owner_file": "/run/owner"},
        {"warm": 5, "owner_file": "/run/owner"},
        {"warm": "chat", "owner_file": "/run/owner", "slots": False},
    ],
)
def test_what_cannot_be_kept_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(BadInputError):
        _read(**config)


def test_another_name_than_execs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTPREP_WARM", "chat")
    with pytest.raises(BadInputError, match="kept as 'chat'"):
        _read(warm="other")


def test_a_connector_without_slots_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTPREP_WARM", "chat")
    with pytest.raises(BadInputError, match="slots alone"):
        Settings.read({})


def test_a_name_without_a_file_claims_nothing() -> None:
    with pytest.raises(BadInputError, match="go together"):
        memory.engine_memory({"hostprep.pool": "kv", "hostprep.owner_file": "/run/owner"})


@pytest.mark.parametrize(
    ("key", "value", "warm"),
    [
        ("hostprep.warm", False, True),
        ("hostprep.slots", False, True),
        ("hostprep.warm", "other", True),
        ("hostprep.warm", "chat", False),
        ("hostprep.warm", True, False),
        ("hostprep.wram", "chat", True),
        ("hostprep.mode", "later", False),
    ],
)
def test_what_contradicts_is_refused_before_the_claim(key: str, value: object, warm: bool) -> None:
    config = json.dumps({"kv_connector_extra_config": {key: value}})
    command = (*_SERVE, "--kv-transfer-config", config)
    start = EngineStart(integration_of("vllm-offloading"), command, {}, Options(warm=warm))
    with pytest.raises(BadInputError, match=key):
        launch.requirements(start)


def test_a_region_without_room_for_its_directory_is_refused_before_the_claim() -> None:
    integration = integration_of("vllm-offloading")

    def least_bytes(*, warm: bool) -> int:
        start = EngineStart(integration, _SERVE, {}, Options(warm=warm))
        required = launch.requirements(start)
        assert ("directory" in required.because) == warm
        return required.size_bytes

    assert least_bytes(warm=False) == 1
    assert least_bytes(warm=True) > Directory.size_bytes_for(1, 36)


def test_the_connector_that_sees_all_comes_with_warm_only() -> None:
    def connector(*, warm: bool) -> dict[str, Any]:
        integration = integration_of("vllm-offloading")
        start = EngineStart(integration, _SERVE, {}, Options(warm=warm))
        launch.requirements(start)
        command = launch.complete(start, leases_of(1 << 30)).command
        config: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
        return config

    assert connector(warm=False)["kv_connector"] == "OffloadingConnector"
    kept = connector(warm=True)
    assert kept["kv_connector"] == "HostprepOffloadingConnector"
    assert kept["kv_connector_module_path"] == "hostprep.engines.vllm"
