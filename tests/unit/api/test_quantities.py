"""Quantities that are written by us: exact, short, and read back by us."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.errors import BadInputError
from hostprep.units import format_quantity, parse_quantity

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0"),
        (1, "1"),
        (1023, "1023"),
        (1024, "1Ki"),
        (8 << 30, "8Gi"),
        (17 << 29, "8704Mi"),
        (1 << 50, "1Pi"),
        ((1 << 50) + 1, "1125899906842625"),
    ],
)
def test_a_quantity_is_written_in_the_largest_unit_that_is_exact(
    size_bytes: int, text: str
) -> None:
    assert format_quantity(size_bytes) == text


@given(st.integers(0, (1 << 63) - 1) | st.integers(0, 62).map(lambda shift: 1 << shift))
def test_a_quantity_comes_back_as_it_was_written(size_bytes: int) -> None:
    assert parse_quantity(format_quantity(size_bytes), zero=True) == size_bytes


@pytest.mark.parametrize("text", ["0", "0Gi", "-0", "0.0"])
def test_zero_is_a_quantity_only_where_it_may_be_one(text: str) -> None:
    assert parse_quantity(text, zero=True) == 0
    with pytest.raises(BadInputError, match="more than zero"):
        parse_quantity(text)


def test_less_than_zero_is_none_even_where_zero_is() -> None:
    with pytest.raises(BadInputError, match="must not be negative"):
        parse_quantity("-1", zero=True)


@pytest.mark.parametrize("text", ["80000e-1", "0.9999999999", "1e-1"])
def test_what_kubernetes_would_round_is_no_quantity(text: str) -> None:
    with pytest.raises(BadInputError, match="not a quantity"):
        parse_quantity(text)
