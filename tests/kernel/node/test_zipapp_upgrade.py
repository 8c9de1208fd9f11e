"""A version of the zipapp published under a running engine, which then imports more of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostprep.linux.files import atomic_write
from hostprep.node.apply import publish
from hostprep.node.apply.service import Node
from hostprep.zipapp import STABLE_NAME, is_version
from testbed.machine import POOL, pool_of
from testbed.processes import wait_for
from tests.support.zipapps import another_version

pytestmark = pytest.mark.kernel

_ENGINE = """
import sys
if "late" not in sys.argv:
    import hostprep
print("started", flush=True)
sys.stdin.readline()
import hostprep.cuda.gate, hostprep.slots
import importlib.metadata
points = importlib.metadata.distribution("hostprep").entry_points
print(hostprep.cuda.gate.__file__, sorted(point.group for point in points), flush=True)
sys.stdin.readline()
"""
_PYTHON = shutil.which("python3", path="/usr/bin") or sys.executable


@pytest.fixture
def upgrade(node: Node, monkeypatch: pytest.MonkeyPatch) -> _Upgrade:
    """A pool, and another version of the zipapp published each time it is called."""
    node.prepare([pool_of(regions=2)])
    return _Upgrade(node, monkeypatch)


class _Upgrade:
    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self._node = node
        self._monkeypatch = monkeypatch
        self._number = 0
        self.data = b""

    def __call__(self) -> None:
        self._number += 1
        self.data = another_version(self._number)
        self._monkeypatch.setattr(publish, "build_zipapp", lambda: self.data)
        self._node.prepare([pool_of(regions=2)])
        assert Path(self._node.root, STABLE_NAME).read_bytes() == self.data


def _versions(node: Node) -> set[str]:
    return set(filter(is_version, os.listdir(node.root)))


@contextmanager
def _engine(node: Node, *words: str, before: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*before, _PYTHON, "-c", _ENGINE, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{node.root}/{STABLE_NAME}"},
        cwd="/",
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            yield process
        finally:
            process.kill()


def _go_on(engine: subprocess.Popen[str]) -> str:
    assert engine.stdin is not None
    assert engine.stdout is not None
    engine.stdin.write("\n")
    engine.stdin.flush()
    return engine.stdout.readline()


def _exec(node: Node, *hostprep: str) -> tuple[str, ...]:
    return (*hostprep, "exec", "--pool", POOL, "--root", node.root, "--")


def _starts(node: Node) -> dict[str, tuple[str, ...]]:
    root = node.root
    read_only = f'mount --bind {root} {root} && mount -o remount,bind,ro {root} && exec "$@"'
    return {
        "PYTHONPATH alone": (),
        "exec of a wheel": _exec(node, sys.executable, "-I", "-m", "hostprep"),
        "exec of the zipapp": _exec(node, _PYTHON, f"{root}/{STABLE_NAME}"),
        "a container": ("unshare", "--mount", "sh", "-c", read_only, "sh"),
    }


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("PYTHONPATH alone", ()),
        ("a container", ()),
        ("exec of a wheel", ()),
        ("exec of a wheel", ("late",)),
        ("exec of the zipapp", ()),
        ("exec of the zipapp", ("late",)),
    ],
)
def test_an_engine_imports_from_its_own_version_after_upgrades(
    node: Node, upgrade: _Upgrade, start: str, words: tuple[str, ...]
) -> None:
    (first,) = _versions(node)
    with _engine(node, *words, before=_starts(node)[start]) as engine:
        upgrade()
        upgrade()
        assert first in _versions(node)
        assert len(_versions(node)) == 2
        told = _go_on(engine)
        groups = ["lmcache.device_plugins", "sglang.srt.plugins"]
        assert told == f"{node.root}/{first}/hostprep/cuda/gate.py {groups}\n"
    # Its end, by kill -9, was the lock's: the next one to publish removes the file.
    upgrade()
    assert first not in _versions(node)
    assert len(_versions(node)) == 1


def test_without_versions_the_same_engine_fails(
    node: Node, upgrade: _Upgrade, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the versions are for: a publisher that replaces the stable name's file alone."""

    def publish_before(root: str) -> None:
        for version in _versions(node):
            os.unlink(f"{root}/{version}")
        atomic_write(f"{root}/{STABLE_NAME}", upgrade.data, mode=0o755)

    monkeypatch.setattr("hostprep.node.apply.service.publish_zipapp", publish_before)
    upgrade()
    with _engine(node) as engine:
        upgrade()
        assert _go_on(engine) == ""
        assert engine.stderr is not None
        assert "zipimport.ZipImportError: bad local file header" in engine.stderr.read()


def test_a_version_in_use_outlives_the_last_pool_and_goes_with_the_next_release(
    node: Node, upgrade: _Upgrade
) -> None:
    (first,) = _versions(node)
    with _engine(node) as engine:
        upgrade()
        node.release([POOL])
        assert first in os.listdir(node.root)
        assert f"{node.root}/{first}/" in _go_on(engine)
    node.prepare([pool_of()])
    node.release([POOL])
    assert not os.path.exists(node.root)


def test_the_helper_beside_an_engine_runs_from_a_version(node: Node, upgrade: _Upgrade) -> None:
    """`--engine mooncake-store` and its like start `python3 -m hostprep...` later than exec."""
    (first,) = _versions(node)
    code = (
        "import os\n"
        "from hostprep.engines.helper_process import start_beside\n"
        "from hostprep.zipapp import pass_on\n"
        "print(start_beside('lmcache', [], ['true'])[2], flush=True)\n"
        "pass_on({})\n"
        "os.execvp('sleep', ['sleep', '600'])\n"
    )
    with subprocess.Popen(
        [_PYTHON, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": f"{node.root}/{STABLE_NAME}", "PATH": os.environ["PATH"]},
        cwd="/",
    ) as process:
        try:
            wait_for(lambda: _name(process.pid) == "sleep", 30, why="it became no sleep")
            upgrade()
            assert first in _versions(node)
        finally:
            process.kill()
        assert process.stdout is not None
        assert f"PYTHONPATH={node.root}/{first} " in process.stdout.read()


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
