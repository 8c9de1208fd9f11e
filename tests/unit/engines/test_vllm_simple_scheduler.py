"""Who may use the tier while ranks register. The same against vLLM's classes: tests/engines."""

from __future__ import annotations

import logging

import pytest

from hostprep.engines.vllm.simple_scheduler import TierGate

pytestmark = pytest.mark.unit

LOG = logging.getLogger("test")


def test_an_early_request_stays_out_for_life_and_a_later_one_does_not() -> None:
    gate = TierGate(1, None, LOG)
    assert not gate.admits("early")
    gate.report({0: ("Ready", "")})
    assert gate.is_open
    assert not gate.admits("early")
    assert gate.admits("late")
    gate.forget("early")
    assert gate.admits("early")


def test_nothing_is_kept_of_requests_once_the_tier_is_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = TierGate(2, None, LOG)
    gate.report({1: ("Failed", "out of memory"), 0: ("Ready", "")})
    gate.report({1: ("Ready", "")})
    assert gate.is_decided
    assert not any(gate.admits(f"r{number}") for number in range(100))
    assert gate._early == set()
    assert "out of memory" in gate.why
    assert len([text for text in caplog.messages if "GPU memory alone" in text]) == 1


def test_closing_it_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    gate = TierGate(1, None, LOG)
    gate.close()
    assert not gate.admits("a")
    assert caplog.messages == []
