"""What people see of a registration that an engine waits for."""

from __future__ import annotations

import logging

import pytest

from hostprep.backing import GIB
from hostprep.cuda.registration_state import Progress
from hostprep.engines.host_memory import ProgressLog

pytestmark = pytest.mark.unit


def _progress(state: str, done_gib: int, elapsed_s: float) -> Progress:
    return Progress(
        state=state,
        done_bytes=done_gib * GIB,
        size_bytes=64 * GIB,
        chunks=done_gib * 4,
        longest_chunk_s=0.051,
        elapsed_s=elapsed_s,
    )


def test_it_says_how_fast_it_is_and_what_is_left_and_when_it_is_done(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    now_s = [100.0]
    monkeypatch.setattr("hostprep.engines.host_memory.time.monotonic", lambda: now_s[0])
    show = ProgressLog(logging.getLogger("test"), "L1 in node0-0")
    for second in range(9):
        now_s[0] = 100.0 + second
        show(_progress("Registering", 0, 0.0))
        show(_progress("Registering", second + 1, second + 1.0))
    assert caplog.messages == []
    now_s[0] = 110.0
    show(_progress("Registering", 40, 10.0))
    show(_progress("Registering", 41, 10.2))
    show(_progress("Registered", 64, 16.0))
    assert caplog.messages == [
        "L1 in node0-0: 40 GiB of 64 GiB registered with CUDA, 4.0 GiB/s, 6 s left",
        "L1 in node0-0: 64 GiB registered with CUDA by 256 calls in 16.0 s, the longest 0.051 s",
    ]
