"""The picture of cold start against attach says what was measured and what was not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cold_start import draw, extrapolate
from hostprep.backing import GIB

pytestmark = pytest.mark.unit

_NUMBERS = Path(__file__).parents[2] / "docs" / "pictures" / "cold-start.json"


def test_the_line_goes_on_through_the_smallest_and_the_largest_size() -> None:
    rows = [{"size_bytes": GIB * size, "cold_s": 1 + 0.5 * size} for size in (1, 2, 8)]
    assert extrapolate(rows, "cold_s", 64 * GIB) == pytest.approx(33)


def test_the_picture_marks_what_is_extrapolated_and_is_of_its_numbers(tmp_path: Path) -> None:
    drawn = tmp_path / "picture.svg"
    draw(json.loads(_NUMBERS.read_text()), drawn)
    text = drawn.read_text()
    assert "extrapolated, not measured" in text
    assert text.count("stroke-dasharray") >= 3
    assert text == _NUMBERS.with_suffix(".svg").read_text(), (
        "python -m benchmarks.cold_start --draw"
    )
