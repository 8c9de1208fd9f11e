"""What is read of kept contents: any engine of the pool may have written it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.client.kept import read_warm_report
from hostprep.client.owner import Owner
from hostprep.client.sidecar import new_sidecar
from hostprep.paths import PoolPaths

pytestmark = pytest.mark.unit

OWNER = Owner("a-secret-of-the-engine", name="chat")


def test_refused_fields_have_names_in_ascii(tmp_path: Path) -> None:
    paths = PoolPaths(str(tmp_path), "kv")
    path = Path(paths.warm_report("node0-0"))
    path.parent.mkdir(parents=True)
    strange = {"\U0001f600" * 80: ["a", "b"], "w\u00e9ights": ["a", "b"], "x" * 81: ["a", "b"]}
    numbers = dict.fromkeys(("at_s", "recovered_blocks", "recovered_bytes"), 1)
    numbers |= dict.fromkeys(("kept_blocks", "loaded_blocks"), 1)
    refused = {**strange, "weights": ["/a", "/b"]}
    path.write_text(json.dumps({**numbers, "refused": refused}))

    report = read_warm_report(paths, "node0-0")

    assert report is not None
    assert report.refused == {"weights": ("/a", "/b")}


@pytest.mark.parametrize(
    ("noted_s", "since_s"), [(500.0, 500.0), (0.0, 1000.0)], ids=["noted", "earlier version"]
)
def test_contents_are_kept_since_their_owners_first_claim_that_is_known(
    noted_s: float, since_s: float
) -> None:
    sidecar = new_sidecar("lease", OWNER.record(since_s=noted_s))
    assert replace(sidecar, claimed_at_s=1000.0).kept_since_s == since_s
