"""How a plugin finds its memory inside an engine, on real regions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hostprep.backing import MIB
from hostprep.engines.memory import engine_memory, engine_region
from hostprep.errors import BadInputError, BusyError, NotReadyError
from hostprep.node.apply.service import Node
from testbed.machine import POOL, pool_of

pytestmark = pytest.mark.kernel

_GROUP = 54321
_JOINING = """
import json, sys
from hostprep.engines.memory import engine_memory, engine_region
from hostprep.errors import HostprepError
asked = json.loads(sys.argv[1])
try:
    place = engine_region(asked["config"], index=asked["index"], processes=4)
    memory = engine_memory(asked["config"], size_bytes=asked["size"], index=asked["index"])
except HostprepError as error:
    print(type(error).__name__, error)
else:
    memory.buffer[:4] = b"here"
    print(memory.region.name, place.region.name, memory.lease_id == place.lease_id, place.board)
"""


def _config(node: Node, **keys: str) -> dict[str, str]:
    named = {f"hostprep.{key}": text for key, text in keys.items()}
    return {"hostprep.pool": POOL, "hostprep.root": node.root, **named}


def _under_exec(node: Node, *, count: int = 1, index: int = 0, size: int = 1, **keys: str) -> str:
    """Ask for memory in a process that `hostprep exec` became; return what it printed."""
    asked = {"config": {f"hostprep.{key}": text for key, text in keys.items()}}
    command = [
        sys.executable, "-m", "hostprep", "exec", "--pool", POOL, "--root", node.root,
        "--count", str(count), "--", sys.executable, "-c", _JOINING,
        json.dumps(asked | {"index": index, "size": size}),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_under_exec_it_is_the_lease_that_is_there(node: Node) -> None:
    node.prepare([pool_of()])
    board = f"{node.root}/{POOL}/state/node0-0/board"
    assert _under_exec(node) == f"node0-0 node0-0 True {board}"
    assert (Path(node.root) / POOL / "mem" / "node0-0").read_bytes()[:4] == b"here"


def test_each_replica_has_a_region_of_its_own(node: Node) -> None:
    """By their numbers in the whole deployment: the second node's begin above its own count."""
    node.prepare([pool_of(regions=2)])
    assert _under_exec(node, count=2, index=1).startswith("node0-1 node0-1 ")
    node.prepare([pool_of(regions=2)])
    assert _under_exec(node, count=2, index=2).startswith("node0-0 node0-0 ")


def test_a_region_that_is_too_small_is_refused_with_both_numbers(node: Node) -> None:
    node.prepare([pool_of(mib=8)])
    said = _under_exec(node, size=9 * MIB)
    assert said.startswith("BadInputError ")
    assert f"{9 * MIB} bytes" in said
    assert f"{8 * MIB} bytes" in said
    for region in ("", "node0-0"):
        with pytest.raises((BadInputError, NotReadyError), match="9 MiB") as refused:
            engine_memory(_config(node, region=region), size_bytes=9 * MIB)
        assert "8 MiB" in str(refused.value)
    with engine_memory(_config(node), size_bytes=8 * MIB) as memory:
        assert memory.size_bytes == 8 * MIB


def test_a_configuration_that_means_other_memory_is_refused(node: Node) -> None:
    node.prepare([pool_of()])
    said = _under_exec(node, pool="other")
    assert said.startswith("BadInputError ")
    assert "'other'" in said
    assert POOL in said


def test_one_process_claims_once(node: Node) -> None:
    node.prepare([pool_of()])
    place = engine_region(_config(node))
    with engine_memory(_config(node)) as memory:
        assert memory.lease_id == place.lease_id
        assert engine_memory(_config(node)) is memory
    with engine_memory(_config(node)) as memory:
        assert memory.lease_id != place.lease_id


def test_several_processes_are_sent_to_exec(node: Node) -> None:
    node.prepare([pool_of()])
    with pytest.raises(BadInputError, match="hostprep exec kv"):
        engine_memory(_config(node), processes=2)
    with engine_memory(_config(node)):
        pass


def test_without_any_memory_it_says_how_to_get_some() -> None:
    with pytest.raises(BadInputError, match="hostprep exec POOL"):
        engine_memory({})


def test_who_comes_second_is_told_that_it_is_leased(node: Node) -> None:
    node.prepare([pool_of()])
    with engine_memory(_config(node)):
        with pytest.raises(BusyError, match=rf"node0-0: leased by .*process {os.getpid()}"):
            engine_memory(_config(node, region="node0-0"))


def test_a_user_of_another_group_is_told_which_one_it_needs(node: Node) -> None:
    Path(node.root).parent.chmod(0o755)
    node.prepare([pool_of(gid=_GROUP)])
    asked = {"config": _config(node), "index": 0, "size": 1}
    keep = "-all,+dac_read_search"
    done = subprocess.run(
        ["setpriv", "--reuid=4321", "--regid=1234", "--clear-groups", f"--inh-caps={keep}",
         f"--bounding-set={keep}", f"--ambient-caps={keep}",
         sys.executable, "-B", "-c", _JOINING.replace("processes=4", "processes=1"),
         json.dumps(asked)],
        capture_output=True, text=True, timeout=60, check=True, cwd=Path(__file__).parents[3],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    )  # fmt: skip
    assert "no permission" in done.stdout
    assert f"(gid {_GROUP})" in done.stdout
