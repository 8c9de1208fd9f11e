"""vLLM's command line as it is given, completed: nothing else changes, and twice is once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.engines.vllm.command_parser import CONFIG, parse_config, read_command
from hostprep.engines.vllm.launch import (
    OFFLOADING,
    SIMPLE,
    TIERING,
    Connector,
    complete_config,
)
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

SERVE = ("vllm", "serve", "some/model")
SIZE = 1 << 30


def _complete(
    words: tuple[str, ...], connector: Connector = TIERING, engine_id: str = "abc"
) -> Any:
    line = read_command(words)
    return line.with_config(
        complete_config(parse_config(line), connector, engine_id=engine_id, size_bytes=SIZE)
    )


def _config(words: tuple[str, ...]) -> dict[str, Any]:
    return parse_config(read_command(words))


plain = st.text(st.characters(codec="ascii", exclude_characters="-.="), min_size=1, max_size=8)
others = st.lists(
    st.one_of(
        plain,
        st.sampled_from(
            ["--port", "8000", "--enforce-eager", "-O3", "--host=::1", "--max_model_len=4k", "-tp"]
        ),
        plain.map(lambda text: f"--x{text}"),
    ),
    max_size=6,
).filter(lambda words: not words or words[-1] != "-tp")
values = st.one_of(st.booleans(), st.integers(), plain, st.lists(st.integers(), max_size=2))
extras = st.dictionaries(plain.map(lambda text: f"x{text}"), values, max_size=3)
"""Keys that mean nothing to us."""


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Configurations that contradict nothing, and say some of it."""
    config: dict[str, Any] = dict(draw(extras))
    if draw(st.booleans()):
        config["kv_connector"] = "OffloadingConnector"
    if draw(st.booleans()):
        config["kv_role"] = draw(st.sampled_from(["kv_both", "kv_producer"]))
    if draw(st.booleans()):
        config["engine_id"] = "mine"
    extra: dict[str, Any] = dict(draw(extras))
    given: bool = draw(st.booleans())
    if given:
        extra["cpu_bytes_to_use"] = draw(st.integers(1, SIZE))
    if draw(st.booleans()):
        extra["secondary_tiers"] = [{"type": "fs"}]
    is_there: bool = draw(st.booleans())
    if extra or is_there:
        config["kv_connector_extra_config"] = extra
    return config


@st.composite
def commands(draw: st.DrawFn) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]:
    """A command, its words beside the configuration, and the configuration."""
    before, after = draw(others), draw(others)
    config = draw(configs())
    name = draw(st.sampled_from([CONFIG, "--kv_transfer_config", "--kv-transfer_config"]))
    text = json.dumps(config)
    spelling = draw(st.sampled_from(["none", "apart", "equals"]))
    if spelling == "none":
        return (*SERVE, *before, *after), (*SERVE, *before, *after), {}
    mine = [name, text] if spelling == "apart" else [f"{name}={text}"]
    return (*SERVE, *before, *mine, *after), (*SERVE, *before, *after), config


@given(commands(), st.sampled_from([TIERING, OFFLOADING, SIMPLE]))
def test_completing_keeps_the_rest_and_completing_again_changes_nothing(
    command: tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]], connector: Connector
) -> None:
    words, rest, config = command
    if connector is SIMPLE and config.get("kv_connector"):
        with pytest.raises(BadInputError, match="OffloadingConnector"):
            _complete(words, connector)
        return
    done = _complete(words, connector)
    index = done.index(CONFIG)
    assert (*done[:index], *done[index + 2 :]) == rest
    assert _complete(done, connector) == done
    result = json.loads(done[index + 1])
    extra = result.pop("kv_connector_extra_config")
    for key, before in config.get("kv_connector_extra_config", {}).items():
        assert extra[key] == before
    for key, before in config.items():
        assert key == "kv_connector_extra_config" or result[key] == before
    assert 1 <= extra["cpu_bytes_to_use"] <= SIZE
    assert result["engine_id"] == config.get("engine_id", "abc")


@given(configs(), st.sampled_from([TIERING, OFFLOADING]))
def test_a_configuration_is_completed_in_a_copy(
    config: dict[str, Any], connector: Connector
) -> None:
    before = json.dumps(config)
    complete_config(config, connector, engine_id="abc", size_bytes=SIZE)
    assert json.dumps(config) == before


@given(st.text(max_size=40))
def test_whatever_is_no_json_object_is_refused(text: str) -> None:
    try:
        is_object = isinstance(json.loads(text), dict)
    except ValueError:
        is_object = False
    if not is_object:
        with pytest.raises(BadInputError):
            _config((*SERVE, CONFIG, text))


def test_nothing_given_becomes_all_that_the_tiering_spec_needs() -> None:
    done = _complete(SERVE)
    assert done[:4] == (*SERVE, CONFIG)
    assert json.loads(done[4]) == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": "abc",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": SIZE,
            "secondary_tiers": [],
        },
    }


def test_keys_given_one_by_one_are_gathered_as_vllm_does() -> None:
    words = (
        *SERVE,
        "--kv_transfer_config.kv_role",
        "kv_both",
        "--port",
        "8000",
        "--kv-transfer-config.kv_connector_extra_config.cpu_bytes_to_use=80m",
        "--kv-transfer-config.kv_connector_extra_config.x+",
        "a,b",
        "--kv-transfer-config.kv_connector_extra_config.x+=c",
    )
    assert _config(words) == {
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 80_000_000, "x": ["a", "b", "c"]},
    }
    done = _complete(words)
    assert (*done[:3], *done[5:]) == (*SERVE, "--port", "8000")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("80m", 80_000_000), ("1G", 1 << 30), ("2.5k", 2500), ("7", 7), ('"8K"', "8K")],
)
def test_numbers_in_json_may_have_a_suffix(text: str, size_bytes: object) -> None:
    config = _config((*SERVE, CONFIG, f'{{"engine_id": "4k{{", "n": {text}}}'))
    assert config == {"engine_id": "4k{", "n": size_bytes}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([CONFIG, "{}", f"{CONFIG}={{}}"], "twice"),
        ([CONFIG, "{}", f"{CONFIG}.kv_role", "kv_both"], "two spellings"),
        ([CONFIG], "no value"),
        ([CONFIG, "{"], "no JSON"),
        ([CONFIG, "[]"], "no JSON object"),
        (["--kv-transfer", "{}"], "short for --kv-transfer-config"),
        ([f"{CONFIG}.a", "1", f"{CONFIG}.a.b", "1"], "no object"),
    ],
)
def test_what_vllm_would_take_otherwise_is_refused(options: list[str], words: str) -> None:
    with pytest.raises(BadInputError, match=words) as caught:
        _config((*SERVE, *options))
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "command",
    [
        ("true",),
        ("bash", "-c", "vllm serve some/model"),
        ("python3", "server.py"),
        ("vllm", "chat", "--url", "x"),
        ("python3", "-m", "vllm_extra"),
    ],
)
def test_a_command_that_would_not_read_our_options_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(BadInputError, match="does not start a vLLM server") as caught:
        read_command(command)
    assert "right before `vllm serve`" in str(caught.value)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (("/opt/venv/bin/vllm", "serve", "m"), "/opt/venv/bin/vllm"),
        (("numactl", "-N0", "vllm", "serve", "m"), "vllm"),
        (("python3", "/usr/bin/vllm", "serve", "m"), "/usr/bin/vllm"),
        (("python3", "-u", "-m", "vllm.entrypoints.openai.api_server"), "python3"),
    ],
)
def test_vllm_is_found_in_the_command(command: tuple[str, ...], program: str) -> None:
    assert read_command(command).program == program
    assert _complete(command)[: len(command)] == command


def test_options_go_before_a_double_dash() -> None:
    done = _complete((*SERVE, "--", "rest"))
    assert done[-2:] == ("--", "rest")
    assert done[3] == CONFIG
