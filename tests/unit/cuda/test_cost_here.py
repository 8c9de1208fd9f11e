"""The known faults of this very machine."""

from __future__ import annotations

import logging

import pytest

from hostprep import known_issues as issues
from hostprep.backing import GIB, MIB
from hostprep.known_issues import driver_text, local_issues, parse_driver_version

pytestmark = pytest.mark.unit

TIB = 1 << 40


def test_a_large_call_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    issues._logged.clear()
    with caplog.at_level(logging.WARNING, logger="hostprep.register"):
        first = issues.warn_once(64 * GIB)
        second = issues.warn_once(64 * GIB)
    assert "LargeCall" in {fault.name for fault in first}
    assert second == ()
    assert len(caplog.records) == len(first)
    assert "480 MiB" in caplog.text


def test_our_own_chunks_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    issues._logged.clear()
    told = {fault.name for fault in issues.warn_once(64 * GIB, 480 * MIB)}
    assert "LargeCall" not in told
    assert len(caplog.records) == len(told)


def test_what_is_harmless_is_told_and_not_warned_of() -> None:
    issues._logged.clear()
    faults = {fault.name: fault.severity for fault in local_issues(TIB, 256 * MIB)}
    assert faults.get("SingleCallLimit", "info") == "info"
    assert "SingleCallLimit" not in {fault.name for fault in issues.warn_once(TIB, 256 * MIB)}


def test_the_driver_is_read_where_there_is_one() -> None:
    words = driver_text()
    assert words is None or parse_driver_version(words) is not None
