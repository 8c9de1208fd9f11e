"""What observe makes of machines that tests cannot have at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostprep.backing import GIB, KIB, MIB
from hostprep.node.facts import Facts, HugePages, PoolFacts
from hostprep.node.observe import HostRoot, observe
from tests.support import host_trees
from tests.support.host_trees import ALL_TREES, TreeKind

pytestmark = pytest.mark.unit


def _facts(tree: Path) -> Facts:
    return observe(host=HostRoot(tree), root=str(tree))


@pytest.mark.parametrize("kind", ALL_TREES, ids=lambda kind: kind.name)
def test_every_tree_is_seen_whole(tmp_path: Path, kind: TreeKind) -> None:
    facts = _facts(kind.write(tmp_path))
    assert facts.warnings == ()
    assert tuple(node.node_id for node in facts.nodes) == kind.node_ids
    assert len(facts.gpus) == kind.gpu_count


@pytest.mark.parametrize("kind", ALL_TREES, ids=lambda kind: kind.name)
def test_nodes_zones_and_blocks_add_up_to_the_machine(tmp_path: Path, kind: TreeKind) -> None:
    facts = _facts(kind.write(tmp_path))
    zones = [zone for node in facts.nodes for zone in node.zones]
    page = facts.memory.page_bytes
    blocks = sum(n * page << order for z in zones for order, n in enumerate(z.free_blocks))
    assert sum(zone.managed_bytes for zone in zones) == facts.memory.total_bytes
    assert sum(node.total_bytes for node in facts.nodes) == facts.memory.total_bytes
    assert sum(zone.free_bytes for zone in zones) == facts.memory.free_bytes == blocks
    assert sum(node.free_bytes for node in facts.nodes) == facts.memory.free_bytes


def test_two_sockets_have_four_gpus_each_and_two_tebibytes(tmp_path: Path) -> None:
    facts = _facts(host_trees.two_socket_8gpu(tmp_path))
    assert [gpu.numa_node for gpu in facts.gpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {gpu.driver for gpu in facts.gpus} == {"nvidia"}
    assert facts.memory.total_bytes == 2048 * GIB * 63 // 64
    assert facts.nodes[1].cpus == (*range(56, 112), *range(168, 224))


def test_neither_switches_nor_management_chips_are_gpus(tmp_path: Path) -> None:
    facts = _facts(host_trees.two_socket_8gpu(tmp_path))
    assert {gpu.vendor_id for gpu in facts.gpus} == {0x10DE}


def test_processing_accelerators_of_amd_are_gpus(tmp_path: Path) -> None:
    facts = _facts(host_trees.eight_node_8gpu(tmp_path))
    assert sorted(gpu.numa_node or 0 for gpu in facts.gpus) == list(range(8))
    assert {gpu.vendor_id for gpu in facts.gpus} == {0x1002}


def test_a_gpu_whose_node_firmware_does_not_tell_has_none(tmp_path: Path) -> None:
    tree = host_trees.fragmented(tmp_path)
    (tree / "sys/bus/pci/devices/0000:17:00.0/numa_node").write_text("-1\n")
    assert _facts(tree).gpus[0].numa_node is None


def test_a_virtual_function_is_not_a_second_gpu(tmp_path: Path) -> None:
    tree = host_trees.fragmented(tmp_path)
    (tree / "sys/bus/pci/devices/0000:17:00.0/physfn").symlink_to("..")
    assert _facts(tree).gpus == ()


def test_gpu_memory_shows_as_movable_nodes_without_cpus(tmp_path: Path) -> None:
    facts = _facts(host_trees.gb200(tmp_path))
    assert facts.kernel.arch == "aarch64"
    assert facts.kernel.hugepage_sizes == (64 * KIB, 2 * MIB, 32 * MIB, GIB)
    hbm = [node for node in facts.nodes if not node.cpus]
    assert [node.node_id for node in hbm] == [2, 10, 18, 26]
    assert all(node.movable_bytes == node.total_bytes for node in hbm)
    assert all(node.contiguous_bytes(4096) == 0 for node in hbm)


def test_the_page_size_is_the_hosts_own(tmp_path: Path) -> None:
    facts = _facts(host_trees.gb200(tmp_path, page_bytes=64 * KIB))
    assert facts.memory.page_bytes == 64 * KIB
    assert facts.nodes[0].contiguous_bytes(64 * KIB) > 450 * GIB


def test_a_fragmented_node_is_free_and_yet_has_no_huge_blocks(tmp_path: Path) -> None:
    node = _facts(host_trees.fragmented(tmp_path)).nodes[0]
    assert node.free_bytes == 400 * GIB
    assert 0 < node.contiguous_bytes(4096) < GIB


def test_an_unfragmented_node_has_nearly_all_of_it_in_huge_blocks(tmp_path: Path) -> None:
    node = _facts(host_trees.two_socket_8gpu(tmp_path)).nodes[1]
    assert node.contiguous_bytes(4096) > node.free_bytes * 0.99


def test_movable_and_cma_memory_are_told_apart_from_the_rest(tmp_path: Path) -> None:
    facts = _facts(host_trees.movable(tmp_path))
    assert facts.nodes[0].movable_bytes == 120 * GIB
    assert facts.nodes[0].free_cma_bytes == 4 * GIB
    assert facts.nodes[1].movable_bytes == facts.nodes[1].total_bytes == 512 * GIB


def test_reclaimable_is_the_file_cache_and_half_of_the_slab(tmp_path: Path) -> None:
    node = _facts(host_trees.fragmented(tmp_path)).nodes[0]
    assert node.reclaimable_bytes == 60 * GIB + 4 * GIB


def test_huge_pages_are_seen_per_node_and_machine_wide(tmp_path: Path) -> None:
    tree = host_trees.two_socket_8gpu(
        tmp_path,
        huge_2mi_per_node=1000,
        huge_2mi_free_per_node=400,
        huge_1gi_per_node=3,
        reserved_2mi=50,
    )
    facts = _facts(tree)
    assert facts.nodes[1].huge(2 * MIB) == HugePages(2 * MIB, total=1000, free=400, surplus=0)
    assert facts.nodes[0].huge(GIB).total == 3
    machine = facts.huge(2 * MIB)
    assert (machine.total, machine.free, machine.reserved) == (2000, 800, 50)


def test_an_unreadable_count_of_huge_pages_is_zero_with_a_warning(tmp_path: Path) -> None:
    tree = host_trees.small(tmp_path, huge_2mi_per_node=8)
    name = "sys/devices/system/node/node0/hugepages/hugepages-2048kB/free_hugepages"
    (tree / name).write_text("?\n")
    facts = _facts(tree)
    assert facts.nodes[0].huge(2 * MIB).free == 0
    assert facts.warnings == (f"/{name} cannot be read: taken as 0",)


def test_memory_that_is_initialised_on_demand_belongs_to_its_node(tmp_path: Path) -> None:
    facts = _facts(host_trees.small(tmp_path, deferred_bytes=20 * GIB))
    node = facts.nodes[0]
    assert node.deferred_bytes == 20 * GIB
    assert node.total_bytes == facts.memory.total_bytes == 24 * GIB
    assert node.free_bytes == facts.memory.free_bytes
    assert node.contiguous_bytes(4096) > 22 * GIB


def test_without_numa_folders_the_machine_is_node_0(tmp_path: Path) -> None:
    tree = host_trees.small(tmp_path, huge_2mi_per_node=8)
    (tree / "sys/devices/system/node").rename(tree / "hidden")
    (tree / "sys/devices/system/cpu").mkdir()
    (tree / "sys/devices/system/cpu/online").write_text("0-1\n")
    facts = _facts(tree)
    node = facts.nodes[0]
    assert (node.node_id, node.cpus, facts.warnings) == (0, (0, 1), ())
    assert node.total_bytes == facts.memory.total_bytes
    assert node.huge(2 * MIB).total == 8
    assert [zone.name for zone in node.zones] == ["DMA", "DMA32", "Normal"]


def test_an_old_kernel_with_swap_is_seen_as_such(tmp_path: Path) -> None:
    facts = _facts(host_trees.old_kernel(tmp_path))
    assert facts.kernel.version == (5, 10)
    assert not facts.kernel.has_populate_write
    assert not facts.kernel.has_tmpfs_noswap
    assert facts.memory.swap_total_bytes == 8 * GIB
    assert facts.process.memlock_limit_bytes == 65536


def test_free_memory_can_be_chosen_per_node(tmp_path: Path) -> None:
    facts = _facts(host_trees.gb200(tmp_path, free_bytes_per_node=300 * GIB))
    assert [node.free_bytes // GIB for node in facts.nodes] == [300, 300, 183, 183, 183, 183]


def test_a_release_can_be_chosen(tmp_path: Path) -> None:
    kernel = _facts(host_trees.small(tmp_path, release="6.4.0")).kernel
    assert kernel.has_tmpfs_noswap
    assert not kernel.has_idmapped_hugetlbfs


def test_a_privileged_process_of_the_host_is_told_from_a_pods(tmp_path: Path) -> None:
    ours = _facts(host_trees.kubepod(tmp_path / "a")).process
    pods = _facts(host_trees.kubepod(tmp_path / "b", privileged=False)).process
    assert (ours.can_mount, ours.sees_all_processes) == (True, True)
    assert ours.memlock_limit_bytes is None
    assert (pods.can_mount, pods.sees_all_processes) == (False, False)


def test_a_user_without_privileges_is_seen_as_such(tmp_path: Path) -> None:
    facts = _facts(host_trees.small(tmp_path, euid=1000))
    assert (facts.process.euid, facts.process.can_mount) == (1000, False)
    assert not facts.cgroup.writable


@pytest.mark.parametrize(("mask", "can_mount"), [(1 << 21, True), (~(1 << 21), False)])
def test_only_the_capability_to_administer_the_system_allows_mounting(
    tmp_path: Path, mask: int, can_mount: bool
) -> None:
    tree = host_trees.small(tmp_path)
    status = f"Uid:\t0\t0\t0\t0\nCapEff:\t{mask & (1 << 41) - 1:016x}\n"
    (tree / "proc/self/status").write_text(status)
    assert _facts(tree).process.can_mount is can_mount


def test_knobs_of_transparent_huge_pages_show_the_active_choice(tmp_path: Path) -> None:
    tree = host_trees.small(tmp_path)
    (tree / "sys/kernel/mm/transparent_hugepage/shmem_enabled").unlink()
    thp = _facts(tree).thp
    assert (thp.defrag, thp.shmem_enabled) == ("madvise", "unknown")


def test_pools_are_passed_through(tmp_path: Path) -> None:
    pool = PoolFacts(
        name="kv",
        boot_id=None,
        generation=0,
        published=False,
        regions=(),
        taken=(),
        mounts=(),
    )
    tree = host_trees.small(tmp_path)
    facts = observe(host=HostRoot(tree), root=str(tmp_path), pools=(pool,))
    assert facts.pool("kv") is pool
