"""Warm restarts of vLLM: what must not differ between two starts, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.engines.vllm_server import REPOSITORY, tiny_model
from testbed.engines.weights import write_weights
from tests.engines.playing import play_scenes
from tests.engines.warm_rows import ROWS

pytestmark = [pytest.mark.engines]

_ALWAYS = ("same", "fits")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Play all rows in one process: importing vLLM takes longest."""
    models = tmp_path_factory.mktemp("models")
    for seed in (1, 2):
        write_weights(tiny_model(models / f"seed-{seed}"), seed=seed)
    wrong = play_scenes("warm_scenes", models)
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
    wrong = play_scenes("keeper_scenes", tmp_path)
    assert len(wrong) == 20
    assert not any(wrong.values()), "\n".join(wrong.values())
