"""Programs that an image build runs: mounts stay theirs, failures come with their own words."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hostprep.errors import FailedError
from testbed.cache import Say

__all__ = ["PRIVATE_MOUNTS", "run", "timed"]

PRIVATE_MOUNTS = ("unshare", "--mount", "--propagation", "private")
"""Before a command that mounts: it may be killed, or its umount find somebody inside (a `find`
over the whole machine is enough), and what it leaves is still gone with its last process."""
_TAIL_LINES = 25


def run(
    command: Sequence[str | Path],
    *,
    remedy: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run to its end and return what it printed. Raises FailedError with its last words."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        lines = [*done.stdout.splitlines()[-_TAIL_LINES:], *done.stderr.splitlines()[-_TAIL_LINES:]]
        tail = "\n".join(f"    {line}" for line in lines)
        named = words[len(PRIVATE_MOUNTS) :] if words[0] == PRIVATE_MOUNTS[0] else words
        raise FailedError(
            f"{Path(named[0]).name} failed with exit code {done.returncode}:\n{tail}\n",
            remedy=remedy,
        )
    return done.stdout


@contextmanager
def timed(what: str, say: Say) -> Iterator[None]:
    """Say what begins, and how long it took."""
    say(what)
    start = time.monotonic()
    yield
    say(f"  done in {time.monotonic() - start:.0f} s")
