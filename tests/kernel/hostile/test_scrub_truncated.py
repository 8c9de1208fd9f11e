"""Whoever may write a region may cut it short at any instant: also while root zeroes it."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import threading
import time
from pathlib import Path

import pytest

from hostprep.backing import MIB
from hostprep.client import scrub
from hostprep.client.handoff import read_handoff, walk_region
from hostprep.errors import NotReadyError
from hostprep.linux.files import closing_fd
from hostprep.linux.locks import try_lock
from hostprep.linux.memory import zero
from hostprep.paths import PoolPaths
from tests.kernel.hostile.attackers import ATTACKED, ENGINE, REGION, Pools
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

_SIZE_BYTES = 8 * MIB


def _path(pools: Pools, region: str = REGION) -> str:
    return pools.attacked.region_of(f"mem/{region}")


def test_a_region_cut_short_between_populating_and_zeroing_is_an_error_of_its_own(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a memset this process would end by SIGBUS here."""
    for region in (REGION, "node0-1"):
        pools.dirty(ATTACKED, region)
    inode = os.stat(_path(pools)).st_ino

    def cut(zeros: int, mapping: mmap.mmap, offset: int, size_bytes: int) -> None:
        if os.stat(_path(pools)).st_size and _is_mapped(inode):
            os.truncate(_path(pools), MIB)
        zero(zeros, mapping, offset, size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(scrub, "zero", cut)
        error = pools.errors()[ATTACKED]
    assert error is not None
    assert f"region {REGION} has {MIB} bytes, not {_SIZE_BYTES}" in error.message
    assert not os.path.exists(pools.attacked.clean_mark(REGION))
    assert os.path.exists(pools.attacked.clean_mark("node0-1")), "the other one was not scrubbed"
    pools.bystander_works()
    assert pools.errors()[ATTACKED] is None
    assert os.stat(_path(pools)).st_size == _SIZE_BYTES, "it was not rebuilt"


def _is_mapped(inode: int) -> bool:
    return f" {inode} " in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_a_region_cut_and_extended_while_it_is_scrubbed_is_not_marked_clean(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte of it is zero, and its memory is gone: the next engine would fault it in."""
    pools.dirty(ATTACKED)

    def punch(zeros: int, mapping: mmap.mmap, offset: int, size_bytes: int) -> None:
        zero(zeros, mapping, offset, size_bytes)
        os.truncate(_path(pools), 0)
        os.truncate(_path(pools), _SIZE_BYTES)

    with monkeypatch.context() as patch:
        patch.setattr(scrub, "zero", punch)
        error = pools.errors()[ATTACKED]
    assert error is not None
    assert error.reason == "RegionNotResident"
    assert not os.path.exists(pools.attacked.clean_mark(REGION))


def test_a_region_cut_short_while_its_pages_are_walked_is_named(pools: Pools) -> None:
    region = read_handoff(pools.attacked).regions[0]
    with closing_fd(os.open(_path(pools), os.O_RDONLY)) as fd:
        os.truncate(_path(pools), MIB)
        with pytest.raises(NotReadyError, match=f"region {REGION} has {MIB} bytes"):
            walk_region(region, fd)


def test_root_survives_truncation_at_any_instant(pools: Pools) -> None:
    """Rounds of `prepare` in a process of its own, while an engine cuts what root has locked."""
    pool = PoolPaths(pools.root, "large")
    path = pool.region_of(f"mem/{REGION}")
    prepare = f"prepare {pool.pool} --size 256Mi --regions 1 --backing Base".split()
    prepare += ["--gid", str(ENGINE.gid), "--root", pools.root]
    assert run_hostprep(*prepare).returncode == 0
    with ENGINE.keeps(lambda: _cut_whenever_locked(path)):
        codes: list[int] = []
        while len(codes) < 3 or (1 not in codes and len(codes) < 40):
            Path(pool.clean_mark(REGION)).unlink(missing_ok=True)
            done = run_hostprep(*prepare)
            assert done.returncode in (0, 1), (done.returncode, done.stderr)
            assert "Traceback" not in done.stderr, done.stderr
            codes.append(done.returncode)
            run_hostprep(*prepare)  # which rebuilds it
        assert 1 in codes, "it was never cut in time"
        pools.bystander_works()


def _cut_whenever_locked(path: str) -> threading.Thread:
    """Cut the region short, some milliseconds after root has locked it for a scrub."""
    chance = random.Random(5)

    def run() -> None:
        while True:
            time.sleep(0.001)
            with contextlib.suppress(OSError), closing_fd(os.open(path, os.O_RDONLY)) as fd:
                if try_lock(fd, exclusive=False):
                    continue
                time.sleep(0.005)  # root also locks it for an instant, to see whether it can
                if not try_lock(fd, exclusive=False):
                    time.sleep(chance.random() * 0.02)
                    os.truncate(path, chance.randrange(1 << 16) * 4096)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread
