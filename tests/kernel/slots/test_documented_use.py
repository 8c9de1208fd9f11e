"""The examples of docs/slots.md, as they stand there: one process uses and is killed, one finds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hostprep.node.apply.service import Node
from testbed.machine import pool_of

pytestmark = pytest.mark.kernel

_PAGE = (Path(__file__).parents[3] / "docs" / "slots.md").read_text()

# What an engine has: a layout, a prompt and its hashes, its volume's token, and blocks to copy.
_ENGINE = """
import hashlib, os, signal
from hostprep.slots import Group, Layout

token = "of the engine's own volume"
layout = Layout(32, (Group("full", 8, 4096),))
ids = list(range(100))
block_hashes = [hashlib.sha256(bytes(ids[: 32 * n])).digest() for n in (1, 2, 3)]
loaded = []

def load(memory, at, block):
    loaded.append(memory[at : at + 4096].tobytes() == bytes([block + 1]) * 4096)

def store(memory, at, block):
    memory[at : at + 4096] = bytes([block + 1]) * 4096
"""
_END = """
    print(len(pool.recovered_hashes()), loaded, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _example(heading: str) -> str:
    """The first Python example below a heading."""
    section = re.split(rf"(?m)^#+ {heading}$", _PAGE)[1]
    found = re.search(r"(?ms)^```python\n(.*?)^```", section)
    assert found, f"{heading} has no example"
    return found[1]


def _engine() -> str:
    """An engine made of both examples: the first one's work, in the second one's region."""
    imports, _, use = _example("Use").partition("    # ids:")
    owner = _example("Blocks that outlive the process")
    load, store = re.findall(r"(?m)^ +\.\.\..*$", use)
    at = "at = pool.layout.offset_bytes(group, use.slots[block])"
    work = use.replace(load, f"{' ' * 20}load(attachment.buffer, at, block)").replace(
        store, f"{' ' * 20}{at}\n{' ' * 20}store(attachment.buffer, at, block)"
    )
    imports = "".join(line for line in imports.splitlines(True) if line.startswith("from"))
    return f"{_ENGINE}{imports}{owner}    # ids:{work}{_END}"


def _run(node: Node, program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HOSTPREP_ROOT": node.root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.strip()


def test_the_next_process_of_the_owner_finds_what_a_killed_one_had_committed(node: Node) -> None:
    node.prepare([pool_of()])
    assert _run(node, _engine()) == "0 []"
    assert _run(node, _engine()) == "3 [True, True, True]"
    other = _engine().replace("sha256:...", "sha256:1")
    assert other != _engine()
    assert _run(node, other) == "0 []", "blocks of other weights"
    assert _run(node, other) == "3 [True, True, True]"
    assert _run(node, other.replace("engine's", "neighbour's")) == "0 []", "blocks of another owner"


def test_without_an_owner_the_region_is_zeroed(node: Node) -> None:
    node.prepare([pool_of()])
    nobody = _engine().replace(", owner=Owner(token, {})", "")
    assert nobody != _engine()
    assert [_run(node, nobody) for _ in range(2)] == ["0 []", "0 []"]
