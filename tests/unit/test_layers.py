"""The folder `operator` must not shadow the standard library's module of that name."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

_OPERATOR = Path(__file__).parents[2] / "operator"


@pytest.mark.parametrize("name", ["__init__.py", "conftest.py"])
def test_nothing_makes_the_folder_a_module(name: str) -> None:
    assert (_OPERATOR / "hostprep_operator").is_dir()
    assert not (_OPERATOR / name).exists()


def test_it_holds_no_tests() -> None:
    assert not list(_OPERATOR.rglob("test_*.py"))
