"""What an engine deletes while root scrubs is that region's trouble: no other is held up by it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hostprep.client import scrub
from hostprep.client.claim import claim
from hostprep.client.lease import Request
from hostprep.errors import FailedError
from hostprep.node.apply.runner import ProgressReporter
from hostprep.node.plan.actions import Action, ScrubRegion
from tests.kernel.hostile.attackers import ATTACKED, BYSTANDER, ENGINE, REGION, Pools

pytestmark = pytest.mark.kernel


class Deleting(ProgressReporter):
    """Has an engine delete a file once the zeroing of its region has begun."""

    def __init__(self, path: str) -> None:
        self._path = path

    def advance(self, action: Action, size_bytes: int) -> None:
        if isinstance(action, ScrubRegion) and action.pool == ATTACKED:
            ENGINE.does(lambda: Path(self._path).unlink(missing_ok=True))


def test_a_users_file_that_goes_during_the_scrub_is_an_error_of_that_pool(pools: Pools) -> None:
    pools.dirty(ATTACKED)
    pools.dirty(BYSTANDER)

    with pytest.raises(FailedError, match="users"):
        pools.node.prepare(pools.specs, progress=Deleting(pools.attacked.users_lock(REGION)))

    assert os.path.exists(pools.bystander.clean_mark(REGION)), "the bystander is not scrubbed"
    assert not os.path.exists(pools.attacked.clean_mark(REGION))
    pools.node.prepare(pools.specs)
    assert os.path.exists(pools.attacked.clean_mark(REGION)), "the next run did not go on"


def test_a_users_file_that_goes_while_a_claim_scrubs_is_an_error_or_waited_for(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deleting(*arguments: Any, **options: Any) -> None:
        scrub_file(*arguments, **options)
        users = Path(pools.attacked.users_lock(REGION))
        ENGINE.does(lambda: users.unlink(missing_ok=True))
        monkeypatch.undo()

    scrub_file = scrub.scrub_file
    for wait_s in (0.0, 10.0):
        pools.dirty(ATTACKED)
        monkeypatch.setattr(scrub, "scrub_file", deleting)
        if wait_s:
            claim(pools.attacked, Request(names=(REGION,)), wait_timeout_s=wait_s)[0].close()
        else:
            with pytest.raises(FailedError, match="claim a region of pool"):
                claim(pools.attacked, Request(names=(REGION,)))
