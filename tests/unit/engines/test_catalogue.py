"""The table of engines, and TensorRT-LLM's configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from hostprep.engines import trtllm
from hostprep.engines.catalogue import INTEGRATIONS, integration_of, recorded_tests
from hostprep.engines.launching import EngineStart, Options
from hostprep.engines.main import main
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]


def test_names_are_unique_and_lead_somewhere() -> None:
    names = [each.name for each in INTEGRATIONS]
    assert len(set(names)) == len(names)
    for each in INTEGRATIONS:
        assert each.how in ("configuration", "plugin")
        assert each.docs.startswith("docs/engines/")
        assert not (each.how == "configuration" and (each.background or each.takes_turns))
        assert f"--engine {each.name} " in each.example or each.name == "trtllm"


def test_the_page_says_what_the_table_says() -> None:
    text = (ROOT / "docs/engines/README.md").read_text()
    rows = re.findall(r"^\| \[?`([a-z-]+)`.*\|$", text, flags=re.MULTILINE)
    assert rows == [each.name for each in INTEGRATIONS]
    for each in INTEGRATIONS:
        (line,) = re.findall(rf"^\| \[?`{each.name}`.*$", text, flags=re.MULTILINE)
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        flags = ["yes" if flag else "no" for flag in (each.background, each.takes_turns)]
        assert cells[1:] == [each.engine, ", ".join(each.versions) or "-", each.how, *flags]


def test_docs_lead_to_the_same_record() -> None:
    assert (ROOT / "docs/engines-tested.json").samefile(ROOT / "hostprep/engines/tested.json")
    known = {each.name for each in INTEGRATIONS}
    assert {row.integration for row in recorded_tests()} <= known


def test_another_engine_is_told_what_there_is() -> None:
    with pytest.raises(BadInputError, match="vllm, vllm-offloading") as caught:
        integration_of("vlm")
    assert caught.value.exit_code == 2


def test_engines_prints_a_table_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["engines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["NAME", "ENGINE"]
    assert [line.split()[0] for line in lines[1 : 1 + len(INTEGRATIONS)]] == [
        each.name for each in INTEGRATIONS
    ]
    assert main(["engines", "-o", "json"]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert {document["name"] for document in documents} == {each.name for each in INTEGRATIONS}
    assert main(["engines", "vllm"]) == 0
    assert "hostprep exec kv --engine vllm -- vllm serve" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["vllm", "--connector", "lmcache"],
        ["trtllm", "--server", "tcp://a:1"],
        ["trtllm", "--connector", "lmcache", "--server", "a:1"],
        ["trtllm", "--connector", "mooncake", "--server", "tcp://a:1", "--model-key", "m"],
        ["trtllm", "--connector", "mooncake", "--server", "a:1"],
    ],
)
def test_bad_input_is_2_and_prints_no_configuration(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engines", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("hostprep: ")


def test_tensorrt_llm_is_led_to_an_lmcache_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", "trtllm", "--connector", "lmcache", "--server", "tcp://a:1"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {
        "kv_cache_config": {"enable_block_reuse": True},
        "kv_connector_config": {"connector": "lmcache-mp", "server_url": "tcp://a:1"},
    }


def test_tensorrt_llm_lends_a_mooncake_pool_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["engines", "trtllm", "--connector", "mooncake"]
    assert main(command) == 0
    options = yaml.safe_load(capsys.readouterr().out)
    assert options["kv_connector_config"] == {"connector": "mooncake-store"}
    assert main([*command, "--server", "10.0.0.1:50051", "--model-key", "m"]) == 0
    client = json.loads(capsys.readouterr().out)
    assert client["global_segment_size"] == 0
    assert client["master_server_address"] == "10.0.0.1:50051"


def test_the_help_teaches_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["exec", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "hostprep exec kv --engine vllm-offloading -- vllm serve MODEL" in text
    assert "see `hostprep engines`" in text


def test_exec_says_why_tensorrt_llm_has_nothing_to_claim() -> None:
    environ = {"TLLM_KV_CACHE_MANAGER_V2_THP": "1"}
    with pytest.raises(BadInputError, match="anonymous memory.*V2_THP is set") as caught:
        trtllm.requirements(
            EngineStart(integration_of("trtllm"), ("trtllm-serve", "m"), environ, Options())
        )
    assert "--connector lmcache" in str(caught.value)
