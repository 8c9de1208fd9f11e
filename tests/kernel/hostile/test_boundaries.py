"""Whatever goes wrong with one pool is that pool's error, and no other's."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from hostprep.agent.verification import verify_node
from hostprep.cli.main import cli
from hostprep.client.handoff import Region
from hostprep.client.scrub import remove_stale_links
from hostprep.client.sidecar import is_clean
from hostprep.errors import HostprepError
from hostprep.node.apply import regions, service
from hostprep.node.apply.regions import mark_damaged
from hostprep.node.facts import PoolFacts
from hostprep.node.observe import pools as observed_pools
from hostprep.paths import PoolPaths
from tests.kernel.hostile.attackers import ATTACKED, BYSTANDER, REGION, Pools

pytestmark = pytest.mark.kernel


class SurpriseError(Exception):
    """An exception that no code expects."""


@pytest.fixture
def unobservable(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> Pools:
    """The attacked pool holds something that ends whoever looks at it."""

    def surprise(paths: PoolPaths, region: Region) -> bool:
        if paths.pool == ATTACKED:
            raise SurpriseError("never seen before")
        return is_clean(paths, region)

    monkeypatch.setattr(observed_pools, "is_clean", surprise)
    return pools


def test_a_pool_that_cannot_be_looked_at_is_left_as_it_is_and_costs_no_other(
    unobservable: Pools,
) -> None:
    pools = unobservable
    before = pools.attacked.handoff
    inode = _inode(before)
    pools.bystander_works_in_process()
    results = pools.reconcile()
    unmet = results[ATTACKED].plan.unmet
    assert unmet is not None
    assert unmet.reason == "CannotLook"
    assert "never seen before" in unmet.why
    assert _inode(before) == inode, "a pool that cannot be looked at was changed"

    observation = verify_node(pools.root).observation
    assert [pool.failure != "" for pool in observation.pools] == [True, False]


def test_the_commands_show_it_and_go_on(unobservable: Pools) -> None:
    root = unobservable.root
    shown = CliRunner().invoke(cli, ["status", "--root", root])
    assert shown.exit_code == 0, shown.output
    assert "cannot be looked at" in shown.output
    assert BYSTANDER in shown.output
    found = CliRunner().invoke(cli, ["doctor", "-o", "json", "--root", root])
    assert "cannot be looked at" in found.stdout
    assert CliRunner().invoke(cli, ["verify", "--root", root]).exit_code == 0
    with pytest.raises(HostprepError, match="cannot be looked at"):
        unobservable.node.release([ATTACKED])
    unobservable.node.release([BYSTANDER])


def test_a_pool_whose_replay_fails_is_not_worked_at(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:

    def surprise(paths: PoolPaths, pool: PoolFacts) -> None:
        if paths.pool == ATTACKED:
            raise SurpriseError("in the replay")
        mark_damaged(paths, pool)

    monkeypatch.setattr(service, "mark_damaged", surprise)
    pools.dirty(ATTACKED)
    pools.bystander_works_in_process()
    error = pools.errors()[ATTACKED]
    assert error is not None
    assert "in the replay" in error.message
    with pytest.raises(HostprepError, match="in the replay"):
        pools.node.prepare(pools.specs)


def test_a_step_that_ends_in_a_surprise_ends_its_pool_only(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:

    def surprise(paths: PoolPaths, region: str) -> None:
        if paths.pool == ATTACKED:
            raise SurpriseError("in a scrub")
        remove_stale_links(paths, region)

    monkeypatch.setattr(regions, "remove_stale_links", surprise)
    pools.dirty(ATTACKED, REGION)
    pools.bystander_works_in_process()
    error = pools.errors()[ATTACKED]
    assert error is not None
    assert error.reason == "Unexpected"


def test_status_as_json_names_the_pools_error(unobservable: Pools) -> None:
    shown = CliRunner().invoke(cli, ["status", "-o", "json", "--root", unobservable.root])
    pools = {pool["name"]: pool for pool in json.loads(shown.stdout)["pools"]}
    assert "never seen before" in pools[ATTACKED]["error"]
    assert pools[BYSTANDER]["error"] is None


def _inode(path: str) -> int:
    return os.stat(path).st_ino
