"""An engine's process whose server was killed ends: else it would hold its region for good."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.parallel]

# A server that starts an engine's process as vLLM does.
_SERVER = """
import multiprocessing, os, signal, sys, time
from hostprep.linux.processes import end_with_parent

def engine(watches):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    assert not watches or end_with_parent()
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    assert not end_with_parent(), "no process of multiprocessing started this one"
    multiprocessing.get_context("fork").Process(target=engine, args=(WATCHES,)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("watches", [True, False])
def test_the_engines_process_ends_with_its_server(watches: bool) -> None:
    program = _SERVER.replace("WATCHES", str(watches))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        engine = os.pidfd_open(int(server.stdout.readline()))
        try:
            assert not select.select([engine], [], [], 0.2)[0], "it ended before its server"
            server.kill()
            has_ended = bool(select.select([engine], [], [], 30 if watches else 0.5)[0])
            assert has_ended == watches
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(engine, signal.SIGKILL)
            os.close(engine)
