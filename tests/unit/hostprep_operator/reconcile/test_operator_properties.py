"""What holds whatever happens, in whatever order, and wherever the operator is killed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.unit.hostprep_operator.reconcile.operator_life import Life

pytestmark = pytest.mark.unit

TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
