"""`hostprep verify` of a pool that cannot be observed."""

from __future__ import annotations

import json

import pytest

from hostprep.cli import status
from hostprep.cli.main import main
from hostprep.node.observe.pools import unobserved

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", [[], ["kv"]])
def test_it_is_not_as_promised_and_the_reason_is_said(
    name: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its handoff says: that may look sound."""
    pools = (unobserved("kv", OSError(40, "too many links")),)
    monkeypatch.setattr(status, "observe_pools", lambda _root: pools)
    monkeypatch.setattr(status, "read_handoff", lambda _paths: pytest.fail("it was read"))
    assert main(["verify", *name, "-o", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    (verdict,) = document["regions"]
    assert not document["ok"]
    assert (verdict["pool"], verdict["reason"]) == ("kv", "CannotLook")
    assert "too many links" in verdict["problem"]
