"""What the boot script reserves and mounts, on machines that tests cannot have at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import PoolSpec, mount_options, reserve_of, root_options
from hostprep.backing import GIB, MIB, Backing
from hostprep.node.observe import HostRoot, observe
from hostprep.node.plan import plan
from hostprep.node.plan.actions import MountMemory, ReserveHugePages, Shortfall
from tests.support import host_trees
from tests.support.boot_runs import SHELLS, BootHost

pytestmark = pytest.mark.unit

MakeHost = Callable[..., BootHost]


@pytest.fixture(params=SHELLS, ids=lambda shell: shell[0])
def make_host(tmp_path: Path, request: pytest.FixtureRequest) -> MakeHost:
    def make(tree: str, **tweaks: Any) -> BootHost:
        folder = tmp_path / "host"
        folder.mkdir()
        written = getattr(host_trees, tree)(folder, **tweaks)
        return BootHost(written, tmp_path / "run" / "hostprep", request.param)

    return make


def _spec(size: str = "64Gi", backings: str = "HugeTLB2Mi,Base", **options: Any) -> PoolSpec:
    return spec_from_options(name="kv", size=size, backings=backings, **options)


def test_each_node_gets_its_share_and_the_result_says_so(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    result = host.run(_spec())
    assert host.pages(0, 1) == [16384, 16384]
    assert result == {
        "version": 1,
        "pool": "kv",
        "boot_id": "3f1c9a52-8d0e-4b6f-9a77-5c2e1d0b4a68",
        "backing": "HugeTLB2Mi",
        "page_bytes": 2 * MIB,
        "complete": True,
        "mounted": True,
        "nodes": [
            {"node": 0, "backing": "HugeTLB2Mi", "wanted": 16384, "got": 16384},
            {"node": 1, "backing": "HugeTLB2Mi", "wanted": 16384, "got": 16384},
        ],
        "passed_over": [],
        "why": "",
    }


def test_the_mount_has_the_agents_options_and_flags(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    host.run(_spec(gid=1234))
    agents = mount_options(Backing.HUGETLB_2MI, gid=1234, size_bytes=64 * GIB)
    assert agents == f"mode=0750,gid=1234,pagesize=2097152,size={64 * GIB}"
    assert host.memory_mounts == [
        f"-t hugetlbfs -o nosuid,nodev,noexec,{agents} hostprep {host.root}/kv/mem"
    ]
    assert (host.root / "kv").stat().st_mode & 0o777 == 0o750


def test_an_empty_root_gets_a_file_system_of_its_own_once(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    host.run(_spec())
    first, *others = host.mount_log.read_text().splitlines()
    own = f"nosuid,nodev,noexec,mode=0755,{root_options()}"
    assert first == f"-t tmpfs -o {own} hostprep {host.root}"
    assert others == host.memory_mounts
    host.run(replace(_spec(), name="second"))
    assert host.mount_log.read_text().count("-t tmpfs") == 1


@pytest.mark.parametrize("name", [".kept", "kept"])
def test_a_root_in_use_keeps_its_file_system(make_host: MakeHost, name: str) -> None:
    host = make_host("two_socket_8gpu")
    host.root.mkdir(parents=True, exist_ok=True)
    (host.root / name).symlink_to("nowhere")
    assert host.run(_spec())["mounted"] is True
    assert "-t tmpfs" not in host.mount_log.read_text()


def test_a_root_with_a_mount_keeps_it(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    with (host.tree / "proc/self/mountinfo").open("a") as file:
        file.write(f"99 1 0:9 / {host.root} rw - tmpfs mine rw\n")
    assert host.run(_spec())["mounted"] is True
    assert "-t tmpfs" not in host.mount_log.read_text()


@pytest.mark.parametrize("regions", ["PerNUMANode", "PerGPU", "Single", 1, 3, 11])
@pytest.mark.parametrize(
    "tree", ["two_socket_8gpu", "eight_node_8gpu", "gb200", "small", "kubepod", "fragmented"]
)
@pytest.mark.parametrize("backing", ["HugeTLB2Mi", "HugeTLB1Gi"])
def test_it_reserves_what_the_planner_would_on_an_unfragmented_machine(
    make_host: MakeHost, tree: str, regions: str | int, backing: str
) -> None:
    host = make_host(tree)
    facts = observe(host=HostRoot(host.tree), root=str(host.root))
    nodes = tuple(replace(node, deferred_bytes=node.free_bytes) for node in facts.nodes)
    spec = _spec("17.5Gi" if backing == "HugeTLB2Mi" else "14.25Gi", backing, regions=regions)
    actions = plan([spec], replace(facts, nodes=nodes)).actions
    wanted = {a.node_id: a.pages for a in actions if isinstance(a, ReserveHugePages)}
    sizes = {a.mount_dir: a.size_bytes for a in actions if isinstance(a, MountMemory)}
    result = host.run(spec)
    reserved = {entry["node"]: entry["got"] for entry in result["nodes"] if entry["got"]}
    assert reserved == wanted, (result, host.stderr)
    kib = 2048 if backing == "HugeTLB2Mi" else 1 << 20
    assert host.pages(*wanted, kib=kib) == list(wanted.values())
    assert host.mount_sizes() == sizes, "the agent's regions must fit, and leave no room"


def test_a_share_does_not_count_the_memory_of_gpus(make_host: MakeHost) -> None:
    host = make_host("gb200")
    host.run(_spec("37%"))
    grace = 960 * GIB
    assert host.pages(0, 1) == [int(grace * 0.37) // 2 // (2 * MIB)] * 2


def test_a_share_of_the_machine_is_reckoned_where_it_boots(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    host.run(_spec("37%"))
    machine = 2048 * GIB * 63 // 64
    assert host.pages(0, 1) == [int(machine * 0.37) // 2 // (2 * MIB)] * 2


def test_memory_without_cpus_is_left_alone(make_host: MakeHost) -> None:
    host = make_host("gb200")
    result = host.run(_spec())
    assert [entry["node"] for entry in result["nodes"]] == [0, 1]
    assert host.pages(2, 10, 18, 26) == [0, 0, 0, 0]


def test_a_node_whose_cpus_are_offline_is_left_alone(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    (host.tree / "sys/devices/system/node/node1/cpulist").write_text("\n")
    host.run(_spec())
    assert host.pages(0, 1) == [32768, 0]


def test_nodes_with_a_movable_zone_give_no_2_mib_pages(make_host: MakeHost) -> None:
    host = make_host("movable")
    result = host.run(_spec("16Gi"))
    assert host.pages(0, 1) == [0, 0]
    assert (result["backing"], result["mounted"]) == ("Base", False)
    assert "ZONE_MOVABLE" in result["passed_over"][0]["why"]


def test_nodes_with_a_movable_zone_give_1_gib_pages(make_host: MakeHost) -> None:
    host = make_host("movable")
    assert host.run(_spec("16Gi", "HugeTLB1Gi"))["complete"] is True
    assert host.pages(0, kib=1 << 20) == [16]


def test_running_it_again_changes_nothing(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu", huge_2mi_per_node=100, huge_2mi_free_per_node=0)
    first = host.run(_spec())
    before = [host.pages_file(node).stat().st_mtime_ns for node in (0, 1)]
    assert host.run(_spec()) == first
    assert [host.pages_file(node).stat().st_mtime_ns for node in (0, 1)] == before
    assert host.pages(0, 1) == [16484, 16484]
    assert len(host.memory_mounts) == 1


def test_free_pages_that_are_there_already_count(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu", huge_2mi_per_node=100)
    host.run(_spec())
    assert host.pages(0, 1) == [16384, 16384]


def test_pages_that_others_use_or_reserved_do_not_count(make_host: MakeHost) -> None:
    host = make_host(
        "two_socket_8gpu", huge_2mi_per_node=100, huge_2mi_free_per_node=80, reserved_2mi=110
    )
    host.run(_spec())
    assert host.pages(0, 1) == [16384 + 100 - 50, 16384 + 100]


def test_more_than_enough_is_left_as_it_is(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu", huge_2mi_per_node=20000)
    assert host.run(_spec())["complete"] is True
    assert host.pages(0, 1) == [20000, 20000]


def test_two_pools_do_not_count_each_others_pages(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu", huge_2mi_per_node=20000)
    host.run(_spec())
    host.run(replace(_spec(), name="other"))
    assert host.pages(0, 1) == [2 * 16384, 2 * 16384]


def test_1_gib_pages_that_come_short_go_back_before_2_mib_ones_are_taken(
    make_host: MakeHost,
) -> None:
    host = make_host("two_socket_8gpu", huge_1gi_per_node=2)
    host.gives_none(1, 1 << 20)
    result = host.run(_spec(backings="HugeTLB1Gi,HugeTLB2Mi,Base"))
    assert host.pages(0, kib=1 << 20) == [32], "the other node keeps what it has"
    assert host.pages(0, 1) == [0, 16384]
    assert (result["backing"], result["complete"], result["mounted"]) == ("HugeTLB1Gi", True, True)
    assert result["passed_over"] == [
        {"backing": "HugeTLB1Gi", "why": "node 1 gave 2 of 32 pages of 1048576 KiB"}
    ]
    assert [entry["backing"] for entry in result["nodes"]] == ["HugeTLB1Gi", "HugeTLB2Mi"]
    mounts = [line.split()[-1] for line in host.memory_mounts]
    assert mounts == [f"{host.root}/kv/mem", f"{host.root}/kv/mem-hugetlb2mi"]
    assert host.mount_sizes() == {"mem": 32 * GIB, "mem-hugetlb2mi": 32 * GIB}


def test_a_second_run_keeps_what_each_node_settled_on(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    host.gives_none(1, 1 << 20)
    wanted = _spec(backings="HugeTLB1Gi,HugeTLB2Mi")
    first = host.run(wanted)
    again = host.run(wanted)
    assert again | {"passed_over": []} == first | {"passed_over": []}
    assert (host.pages(0, kib=1 << 20), host.pages(0, 1)) == ([32], [0, 16384])
    assert len(host.memory_mounts) == 2


def test_an_interleaved_region_gets_the_same_pages_on_all_nodes(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    host.gives_none(1, 1 << 20)
    result = host.run(_spec(backings="HugeTLB1Gi,HugeTLB2Mi", regions="Single"))
    assert (host.pages(0, kib=1 << 20), host.pages(0, 1)) == ([0], [16384, 16384])
    assert [entry["backing"] for entry in result["nodes"]] == ["HugeTLB2Mi"] * 2


def test_free_pages_are_counted_once_for_all_nodes(make_host: MakeHost) -> None:
    """What is free on node 0 and reserved by others may be reserved on either: it is not ours."""
    host = make_host("two_socket_8gpu", huge_2mi_per_node=100, reserved_2mi=150)
    host.run(_spec())
    assert sum(host.pages(0, 1)) == 2 * 16384 + 150


@pytest.mark.parametrize("short_kib", [2048, 1 << 20])
def test_the_agent_plans_onto_what_the_script_has_mounted(
    make_host: MakeHost, short_kib: int
) -> None:
    host = make_host("two_socket_8gpu")
    host.gives_none(1, short_kib)
    order = "HugeTLB1Gi,HugeTLB2Mi" if short_kib > 2048 else "HugeTLB2Mi,HugeTLB1Gi"
    host.run(_spec(backings=order))
    mounts = [line.split()[-1].rpartition("/")[2] for line in host.memory_mounts]
    facts = observe(host=HostRoot(host.tree), root=str(host.root))
    short = Shortfall("kv", Backing(order.split(",", maxsplit=1)[0]), "as the script saw", 1)
    made = plan([_spec(backings=order)], facts, shortfalls=[short])
    assert [a.mount_dir for a in made.actions if isinstance(a, MountMemory)] == mounts


def test_pages_that_come_short_go_back_where_another_backing_serves(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu", huge_2mi_per_node=10, huge_2mi_free_per_node=0)
    host.gives_none(1)
    result = host.run(_spec())
    assert host.pages(0) == [10 + 16384], "the other node keeps what it has"
    assert (result["backing"], result["mounted"], result["complete"]) == ("HugeTLB2Mi", True, True)
    assert [entry["node"] for entry in result["nodes"]] == [0]


def test_pages_that_come_short_go_back_on_the_node_that_was_short(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu", huge_2mi_per_node=10, huge_2mi_free_per_node=0)
    host.gives_none(0)
    host.gives_none(1)
    result = host.run(_spec())
    assert (result["backing"], result["mounted"], result["page_bytes"]) == ("Base", False, 0)


def test_pages_that_come_short_stay_where_nothing_else_serves(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    host.gives_none(1)
    result = host.run(_spec(backings="HugeTLB2Mi"))
    assert host.pages(0) == [16384]
    assert (result["complete"], result["mounted"]) == (False, True)
    assert result["nodes"][1] == {
        "node": 1,
        "backing": "HugeTLB2Mi",
        "wanted": 16384,
        "got": 0,
    }
    assert result["why"] == "node 1 gave 0 of 16384 pages of 2048 KiB"


def test_nothing_is_taken_that_the_node_needs(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu", free_bytes_per_node=4 * GIB)
    result = host.run(_spec("64Gi"))
    assert host.pages(0, 1) == [0, 0]
    assert "must keep" in result["passed_over"][0]["why"]


def test_the_reserve_is_kept(make_host: MakeHost) -> None:
    host = make_host("two_socket_8gpu")
    assert host.run(_spec("1500Gi"))["complete"] is True
    host = replace_host(host)
    assert host.run(_spec("1500Gi", reserve="500Gi"))["backing"] == "Base"
    assert host.pages(0, 1) == [0, 0]


@pytest.mark.parametrize(
    ("tree", "reserve_bytes"), [("small", 983 * MIB), ("two_socket_8gpu", 16 * GIB)]
)
def test_without_a_reserve_it_keeps_what_the_planner_keeps(
    make_host: MakeHost, tree: str, reserve_bytes: int
) -> None:
    host = make_host(tree)
    facts = observe(host=HostRoot(host.tree), root=str(host.root))
    wanted = reserve_of(None, facts.memory.total_bytes)
    assert wanted // MIB == reserve_bytes // MIB
    node_count = len(facts.nodes)
    available = facts.nodes[0].free_bytes + facts.nodes[0].reclaimable_bytes
    most = (available - reserve_bytes // node_count) // (2 * MIB) * node_count - 2 * node_count
    too_much = replace(_spec(), size_bytes=(most + 4 * node_count) * 2 * MIB, reserve_bytes=None)
    assert host.run(too_much)["backing"] == "Base"
    fits = replace(too_much, size_bytes=most * 2 * MIB)
    assert host.run(fits)["backing"] == "HugeTLB2Mi"


def replace_host(host: BootHost) -> BootHost:
    """Return a fresh machine of the same kind."""
    folder = host.tree.parent.parent / "second"
    folder.mkdir()
    return BootHost(host_trees.two_socket_8gpu(folder), folder / "run", host.shell)


def test_more_than_the_machine_has_is_told(make_host: MakeHost) -> None:
    host = make_host("small")
    result = host.run(_spec("1Ti"))
    assert "1073741824 KiB are asked for" in result["why"]
    assert (result["complete"], result["backing"]) == (False, None)


@pytest.mark.parametrize("backing", ["THP", "Base"])
def test_tmpfs_first_leaves_everything_to_the_agent(make_host: MakeHost, backing: str) -> None:
    host = make_host("two_socket_8gpu")
    result = host.run(_spec(backings=f"{backing},HugeTLB2Mi"))
    assert (result["backing"], result["complete"], result["mounted"]) == (backing, True, False)
    assert host.pages(0, 1) == [0, 0]
    assert not (host.root / "kv" / "mem").exists()


def test_an_old_kernel_keeps_its_memory(make_host: MakeHost) -> None:
    host = make_host("old_kernel")
    assert "5.14" in host.run(_spec())["why"]
    assert host.pages(0, 1) == [0, 0]


def test_regions_per_gpu_need_a_gpu(make_host: MakeHost) -> None:
    host = make_host("small")
    assert "no GPU" in host.run(_spec("1Gi", regions="PerGPU"))["why"]
