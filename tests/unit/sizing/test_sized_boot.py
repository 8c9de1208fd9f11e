"""Before kubelet: the script reserves for a sized pool what the agent will plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hostprep.api.pool_spec import RegionLayout
from hostprep.backing import Backing
from hostprep.node.observe import HostRoot, observe
from hostprep.node.plan import plan
from hostprep.node.plan.actions import ReserveHugePages
from tests.support import host_trees
from tests.support.boot_runs import SHELLS, BootHost
from tests.unit.sizing.test_sized_pools import spec

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
@pytest.mark.parametrize(
    ("layout", "count"),
    [
        (RegionLayout.COUNT, 5),
        (RegionLayout.PER_GPU, None),
        (RegionLayout.PER_NUMA_NODE, None),
        (RegionLayout.SINGLE, None),
    ],
)
def test_it_reserves_what_the_planner_would(
    tmp_path: Path, shell: tuple[str, ...], layout: RegionLayout, count: int | None
) -> None:
    folder = tmp_path / "host"
    folder.mkdir()
    tree = host_trees.two_socket_8gpu(folder)
    host = BootHost(tree, tmp_path / "run" / "hostprep", shell)
    facts = observe(host=HostRoot(host.tree), root=str(host.root))
    nodes = tuple(replace(node, deferred_bytes=node.free_bytes) for node in facts.nodes)
    sized = spec(2000, backings=(Backing.HUGETLB_2MI,), layout=layout, region_count=count)
    wanted = {
        action.node_id: action.pages
        for action in plan([sized], replace(facts, nodes=nodes)).actions
        if isinstance(action, ReserveHugePages)
    }
    assert wanted
    result = host.run(sized)
    assert result["complete"], host.stderr
    assert host.pages(*wanted) == list(wanted.values())
