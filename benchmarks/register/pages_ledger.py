"""Huge pages that a measurement added to the machine's pool: given back even after a kill -9.

What was added is written down first, in a file that its process holds locked. Whoever finds such a
file unlocked gives the pages back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PREFIX = "hostprep-bench-pages-"


@contextlib.contextmanager
def added_pages(pool: Path, wanted: int, folder: Path = _FOLDER) -> Iterator[int]:
    """Add pages to a pool such as .../hugepages-2048kB, and take them away at the end.

    Gives the number that the kernel had. By difference, since others use the pool as well.
    Raises OSError.
    """
    path = folder / f"{_PREFIX}{os.getpid()}-{pool.name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, f"{pool} {wanted}\n".encode())
        before = _lasting(pool)
        (pool / "nr_hugepages").write_text(str(before + wanted))
        added = _lasting(pool) - before
        try:
            os.pwrite(fd, f"{pool} {added:<{len(str(wanted))}}\n".encode(), 0)
            yield added
        finally:
            _take_away(pool, added)
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def give_back_left_pages(folder: Path = _FOLDER) -> int:
    """Take away what processes added that were killed since; returns how many pages."""
    count = 0
    for path in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                pool, added = os.read(fd, 4096).decode().split()
                _take_away(Path(pool), int(added))
                count += int(added)
                path.unlink(missing_ok=True)
            finally:
                os.close(fd)
    return count


def _take_away(pool: Path, pages: int) -> None:
    if pages:
        (pool / "nr_hugepages").write_text(str(max(0, _lasting(pool) - pages)))


def _lasting(pool: Path) -> int:
    """Return the number of pages that was asked for.

    Those that were taken away while in use are surplus: they go with their last user.
    """
    numbers = [int((pool / f"{kind}_hugepages").read_text()) for kind in ("nr", "surplus")]
    return numbers[0] - numbers[1]
