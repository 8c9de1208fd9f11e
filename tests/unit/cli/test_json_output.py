"""What commands print for programs is JSON as RFC 8259 has it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import pytest

from hostprep.console import print_json

pytestmark = pytest.mark.unit


@dataclass
class _Measured:
    took_s: float
    rates: dict[str, list[float]]


def _refuse(name: str) -> object:
    raise AssertionError(f"{name} is no JSON")


def test_numbers_that_are_none_are_null_however_deep(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([_Measured(math.nan, {"a": [1.5, math.inf, -math.inf]})])
    document = json.loads(capsys.readouterr().out, parse_constant=_refuse)
    assert document == [{"took_s": None, "rates": {"a": [1.5, None, None]}}]
