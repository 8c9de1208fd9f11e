"""What engines write never reaches a terminal, JSON or the API server raw."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

import hostprep
from hostprep.agent.verification import verify_node
from hostprep.client.sidecar import read_sidecar
from hostprep.cuda import board_layout
from hostprep.cuda.board_layout import FAILED, Header, Slot, generation_of, pack_header, pack_slot
from hostprep.linux.processes import ProcessId
from tests.kernel.hostile.attackers import ATTACKED, ENGINE, REGION, Pools
from tests.kernel.hostile.test_leases import forge
from tests.support.processes import hostprep as run_hostprep

pytestmark = pytest.mark.kernel

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x00\u202eevil"
RAW = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


def _strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


def _texts(value: object) -> list[str]:
    if isinstance(value, dict):
        return [text for member in value.values() for text in _texts(member)]
    if isinstance(value, list | tuple):
        return [text for member in value for text in _texts(member)]
    return [value] if isinstance(value, str) else []


def test_a_holders_command_and_a_mark_of_damage_are_shown_without_escape_codes(
    pools: Pools,
) -> None:
    paths = pools.attacked
    with hostprep.attach(ATTACKED, region=REGION, root=pools.root):
        command = ESCAPES.replace("\x00", "")
        gone = {"pid": 5_000_000, "command": command}
        ENGINE.does(lambda: forge(paths.sidecar(REGION), lambda lease: lease.update(gone)))
        ENGINE.does(lambda: Path(paths.bad_mark("node0-1")).write_text(f"{command}\n8388608\n"))
        for arguments in (("status",), ("doctor",), ("release", ATTACKED), ("verify",)):
            done = run_hostprep(*arguments, "--root", pools.root)
            assert not RAW.search(done.stdout + done.stderr), arguments
        shown = run_hostprep("status", "-o", "json", "--root", pools.root)
        assert not any(map(RAW.search, _texts(_strict(shown.stdout))))
        assert "evil" in shown.stdout
        regions = verify_node(pools.root).observation.pools[0].regions
        texts = [text for region in regions for text in (region.holder, region.message)]
        assert "evil" in "".join(texts)
        assert not any(map(RAW.search, texts))


def test_a_leases_id_with_escape_codes_is_none(pools: Pools) -> None:
    with hostprep.attach(ATTACKED, region=REGION, root=pools.root):
        path = pools.attacked.sidecar(REGION)
        ENGINE.does(lambda: forge(path, lambda lease: lease.update(lease_id="\x1b[2J\x9b31m")))
        shown = run_hostprep("status", "-o", "json", "--root", pools.root)
        assert not any(map(RAW.search, _texts(_strict(shown.stdout))))


def test_a_lone_surrogate_in_a_lease_leaves_the_agents_status_writable(pools: Pools) -> None:
    with hostprep.attach(ATTACKED, region=REGION, root=pools.root):
        path = pools.attacked.sidecar(REGION)
        ENGINE.does(lambda: forge(path, lambda lease: lease.update(command="\ud800")))
        for region in verify_node(pools.root).observation.pools[0].regions:
            region.holder.encode()
        pools.bystander_works()


IMPOSSIBLE: dict[str, tuple[float, dict[str, Any]]] = {
    "NaN": (1.0, {"took_s": math.nan}),
    "infinite": (1.0, {"longest_chunk_s": math.inf}),
    "ages": (1.0, {"took_s": 1e300}),
    "negative": (1.0, {"joined_at_s": -1.0}),
    "bytes": (1.0, {"done_bytes": (1 << 64) - 1}),
    "made at NaN": (math.nan, {}),
    "made at the end of time": (math.inf, {}),
}


def _board(path: str, created_at_s: float, fields: dict[str, Any], run: str = "run") -> None:
    header = pack_header(Header(1, generation_of(run), created_at_s))
    values: dict[str, Any] = {"joined_at_s": 1.0, "reason": ESCAPES, "size_bytes": 1, **fields}
    slot = Slot(1, FAILED, ProcessId(os.getpid(), 1, 1), **values)
    Path(path).write_bytes(header + bytes(board_layout.SLOT_BYTES) + pack_slot(slot))


@pytest.mark.parametrize(("created_at_s", "fields"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_numbers_on_a_board_are_no_numbers_in_json(
    pools: Pools, created_at_s: float, fields: dict[str, Any]
) -> None:
    with hostprep.attach(ATTACKED, region=REGION, root=pools.root):
        path = pools.attacked.board(REGION)
        ENGINE.does(lambda: _board(path, created_at_s, fields))
        shown = run_hostprep("status", "-o", "json", "--root", pools.root)
        document = _strict(shown.stdout)
        assert not any(map(RAW.search, _texts(document)))
        (gate,) = document["gates"]
        assert gate["state"] == "Unknown"
        gates = verify_node(pools.root).observation.pools[0].gates
        assert gates[0].state == "Unknown"
    pools.bystander_works_in_process()


def test_a_ranks_reason_is_shown_without_escape_codes(pools: Pools) -> None:
    with hostprep.attach(ATTACKED, region=REGION, root=pools.root):
        path, sidecar = pools.attacked.board(REGION), read_sidecar(pools.attacked, REGION)
        assert sidecar is not None
        ENGINE.does(lambda: _board(path, 1.0, {}, sidecar.lease_id))
        for output in ("table", "json"):
            done = run_hostprep("status", "-o", output, "--root", pools.root)
            assert "evil" in done.stdout
            assert not RAW.search(done.stdout), done.stdout
        assert not any(map(RAW.search, _texts(_strict(done.stdout))))
