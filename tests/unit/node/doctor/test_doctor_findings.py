"""What the doctor says of machines that tests cannot have at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.api.pool_resource import spec_from_options
from hostprep.api.pool_spec import Placement
from hostprep.backing import GIB, KIB, MIB, Backing
from hostprep.node.doctor import CHECKS, Finding, Severity, diagnose, worst_first
from hostprep.node.facts import (
    CgroupFacts,
    Facts,
    HugePageTotals,
    LedgerEntry,
    Mount,
    PoolFacts,
    RegionFacts,
    RootFacts,
    ThpFacts,
)
from hostprep.node.observe import HostRoot, observe
from tests.support import host_trees
from tests.support.host_trees import ALL_TREES, TreeKind

pytestmark = pytest.mark.unit


def _facts(tree: Path) -> Facts:
    facts = observe(host=HostRoot(tree), root=str(tree))
    root = RootFacts(
        path="/run/hostprep", exists=True, fs_type="tmpfs", writable=True, free_bytes=GIB
    )
    return replace(facts, root=root)


@pytest.fixture
def healthy(tmp_path: Path) -> Facts:
    return _facts(host_trees.two_socket_8gpu(tmp_path, release="6.12.9"))


@pytest.fixture
def new(healthy: Facts) -> Facts:
    kernel = replace(healthy.kernel, release="6.18.1", version=(6, 18))
    return replace(healthy, kernel=kernel, thp=ThpFacts("defer", "never"))


def _of(facts: Facts, check: str) -> list[Finding]:
    return [finding for finding in diagnose(facts) if finding.check == check]


def _one(facts: Facts, check: str, severity: Severity) -> Finding:
    found = [finding for finding in _of(facts, check) if finding.severity is severity]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("kind", ALL_TREES, ids=lambda kind: kind.name)
def test_every_finding_on_every_tree_has_words_and_a_remedy(tmp_path: Path, kind: TreeKind) -> None:
    spec = spec_from_options(name="kv", size="64Gi")
    findings = diagnose(_facts(kind.write(tmp_path)), (spec,))
    assert len(findings) >= len(CHECKS) - 1
    assert all(finding.what and finding.remedy and finding.check for finding in findings)
    assert all("\n" not in finding.what + finding.remedy for finding in findings)


def test_a_healthy_machine_has_nothing_but_ok(new: Facts) -> None:
    assert {finding.severity for finding in diagnose(new)} == {Severity.OK}


@given(st.lists(st.sampled_from(list(Severity))))
def test_findings_come_worst_first_and_else_in_their_order(severities: list[Severity]) -> None:
    findings = [Finding(s, str(index), "what", "remedy") for index, s in enumerate(severities)]
    ordered = worst_first(findings)
    keys = [(list(Severity).index(finding.severity), int(finding.check)) for finding in ordered]
    assert keys == sorted(keys)


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ((5, 13), Severity.ERROR),
        ((5, 14), Severity.INFO),
        ((6, 8), Severity.INFO),
        ((6, 10), Severity.OK),
        ((6, 11), Severity.WARNING),
        ((6, 13), Severity.WARNING),
        ((6, 14), Severity.OK),
        ((0, 0), Severity.WARNING),
    ],
)
def test_kernels_are_judged_by_what_they_can_do(
    new: Facts, version: tuple[int, int], severity: Severity
) -> None:
    facts = replace(new, kernel=replace(new.kernel, version=version))
    assert _of(facts, "kernel")[0].severity is severity


def test_swap_without_noswap_names_swapoff(tmp_path: Path) -> None:
    finding = _one(_facts(host_trees.old_kernel(tmp_path)), "swap", Severity.WARNING)
    assert "8 GiB" in finding.what
    assert "swapoff -a" in finding.remedy


def test_swap_is_no_matter_where_mounts_can_be_noswap(new: Facts) -> None:
    facts = replace(new, memory=replace(new.memory, swap_total_bytes=GIB))
    assert _of(facts, "swap")[0].severity is Severity.OK


def test_swap_matters_where_nothing_can_be_mounted(new: Facts) -> None:
    facts = replace(
        new,
        memory=replace(new.memory, swap_total_bytes=GIB),
        process=replace(new.process, can_mount=False),
    )
    assert _of(facts, "swap")[0].severity is Severity.WARNING


def test_a_fragmented_node_is_named_with_its_share(tmp_path: Path) -> None:
    facts = _facts(host_trees.fragmented(tmp_path))
    finding = _one(facts, "fragmentation", Severity.WARNING)
    assert "node 0" in finding.what
    assert "400 GiB free (0 %)" in finding.what
    assert "node0/compact" in finding.remedy


def test_memory_that_can_be_had_in_2_mib_is_summed_over_the_nodes(healthy: Facts) -> None:
    finding = _one(healthy, "fragmentation", Severity.OK)
    assert finding.what.startswith("1.9 TiB could be had in pages of 2 MiB now")


def test_gpu_memory_is_not_counted_as_to_be_had(tmp_path: Path) -> None:
    finding = _one(_facts(host_trees.gb200(tmp_path)), "fragmentation", Severity.OK)
    assert finding.what.startswith("920.0 GiB")


def test_thp_stalls_are_a_warning_only_where_memory_is_fragmented(
    tmp_path: Path, healthy: Facts
) -> None:
    crumbled = _facts(host_trees.fragmented(tmp_path))
    assert _of(healthy, "thp")[0].severity is Severity.INFO
    assert _one(crumbled, "thp", Severity.WARNING).remedy.startswith("echo defer >")


def test_defrag_always_is_a_warning_anywhere(new: Facts) -> None:
    facts = replace(new, thp=ThpFacts("always", "never"))
    assert _of(facts, "thp")[0].severity is Severity.WARNING


def test_shmem_deny_is_told_with_the_setting_that_lifts_it(new: Facts) -> None:
    facts = replace(new, thp=ThpFacts("defer", "deny"))
    assert "echo never >" in _one(facts, "shmem", Severity.WARNING).remedy


def test_missing_page_sizes_are_told(new: Facts) -> None:
    none = replace(new, kernel=replace(new.kernel, hugepage_sizes=()))
    small = replace(new, kernel=replace(new.kernel, hugepage_sizes=(2 * MIB,)))
    assert _of(none, "huge-page-sizes")[0].severity is Severity.WARNING
    assert "pdpe1gb" in _of(small, "huge-page-sizes")[0].remedy


def test_huge_pages_of_others_are_counted_without_ours(new: Facts) -> None:
    pool = HugePageTotals(2 * MIB, total=600, free=10, reserved=4, surplus=3, overcommit=5)
    held = _pool(new, backing=Backing.HUGETLB_2MI, size_bytes=GIB)
    findings = _of(replace(new, huge_pages=(pool,), pools=(held,)), "huge-pages")
    texts = [finding.what.removeprefix("pages of 2 MiB: ") for finding in findings]
    assert [text.split()[0] for text in texts] == ["5", "78", "6", "4", "3"]
    assert findings[0].severity is Severity.WARNING
    assert "nr_overcommit_hugepages" in findings[0].remedy


def test_pages_and_mounts_that_a_removed_root_left_are_told_with_how_to_give_them_back(
    new: Facts,
) -> None:
    pages = HugePageTotals(2 * MIB, total=40, free=32, reserved=0, surplus=0, overcommit=0)
    path = f"{new.root.path}/gone/mem"
    mount = Mount(path, "hugetlbfs", "hugetlbfs", ("rw", "pagesize=2M"), (0, 99))
    facts = replace(new, huge_pages=(pages,), mounts=(mount,))
    assert _one(facts, "pools", Severity.WARNING).remedy == f"umount {path}"
    idle = _one(facts, "huge-pages", Severity.WARNING)
    assert "32 are free and no pool's" in idle.what
    assert "echo 8 > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages" in idle.remedy


def test_the_turnstiles_mount_is_an_orphan_once_no_pool_is_left(new: Facts) -> None:
    mount = Mount(f"{new.root.path}/turnstile", "tmpfs", "hostprep", ("rw",), (0, 98))
    held = _pool(new, backing=Backing.HUGETLB_2MI, size_bytes=GIB)
    alone = replace(new, mounts=(mount,))
    assert _one(alone, "pools", Severity.WARNING).remedy == f"umount {mount.path}"
    served = _of(replace(alone, pools=(held,)), "pools")
    assert not any("umount" in finding.remedy for finding in served)


def test_free_pages_that_a_pool_accounts_for_are_no_orphans(new: Facts) -> None:
    pages = HugePageTotals(2 * MIB, total=32, free=32, reserved=0, surplus=0, overcommit=0)
    held = replace(
        _pool(new, backing=Backing.HUGETLB_2MI, size_bytes=GIB),
        regions=(),
        taken=(LedgerEntry(0, 2 * MIB, 32),),
    )
    findings = _of(replace(new, huge_pages=(pages,), pools=(held,)), "huge-pages")
    assert not any("no pool's" in finding.what for finding in findings)


@pytest.mark.parametrize(("gpus", "severity"), [(True, Severity.WARNING), (False, Severity.INFO)])
def test_a_memlock_limit_weighs_more_with_gpus(new: Facts, gpus: bool, severity: Severity) -> None:
    process = replace(new.process, memlock_limit_bytes=64 * KIB)
    facts = replace(new, process=process, gpus=new.gpus if gpus else ())
    assert "64 KiB" in _one(facts, "memlock", severity).what


def test_a_pod_with_no_huge_pages_that_cannot_leave_is_an_error(tmp_path: Path) -> None:
    findings = _of(_facts(host_trees.kubepod(tmp_path, privileged=False)), "cgroup")
    assert findings[0].severity is Severity.ERROR
    assert "0 B of pages of 2 MiB" in findings[0].what


def test_a_privileged_agent_in_a_pod_has_nothing_to_do(tmp_path: Path) -> None:
    findings = _of(_facts(host_trees.kubepod(tmp_path)), "cgroup")
    assert {finding.severity for finding in findings} == {Severity.INFO, Severity.OK}


@pytest.mark.parametrize("version", [0, 1])
def test_cgroups_other_than_v2_are_a_warning(new: Facts, version: int) -> None:
    facts = replace(new, cgroup=CgroupFacts(version=version, path="/", memory_limit_bytes=None))
    assert _of(facts, "cgroup")[0].severity is Severity.WARNING


def test_movable_and_cma_memory_are_told(tmp_path: Path) -> None:
    facts = _facts(host_trees.movable(tmp_path))
    assert "node 0 has 120 GiB" in _one(facts, "movable", Severity.WARNING).what
    assert "4 GiB" in _one(facts, "cma", Severity.INFO).what


def test_nodes_without_cpus_are_named(tmp_path: Path) -> None:
    finding = _one(_facts(host_trees.gb200(tmp_path)), "numa", Severity.INFO)
    assert "(2, 10, 18, 26)" in finding.what


def test_uneven_memory_is_told(new: Facts) -> None:
    first, second = new.nodes
    nodes = (first, replace(second, total_bytes=second.total_bytes // 2))
    assert "uneven" in _one(replace(new, nodes=nodes), "numa", Severity.WARNING).what


def test_a_machine_without_a_usable_node_is_an_error(new: Facts) -> None:
    assert _of(replace(new, nodes=()), "numa")[0].severity is Severity.ERROR


def test_gpus_without_a_node_or_a_driver_are_named(new: Facts) -> None:
    lost = replace(new.gpus[0], numa_node=None, driver=None)
    findings = _of(replace(new, gpus=(lost, *new.gpus[1:])), "gpus")
    assert [finding.severity for finding in findings] == [Severity.WARNING] * 2
    assert all(lost.pci_address in finding.what for finding in findings)


def test_gpus_beside_a_full_node_are_told(tmp_path: Path) -> None:
    facts = _facts(host_trees.two_socket_8gpu(tmp_path, free_bytes_per_node=8 * GIB))
    findings = [f for f in _of(facts, "gpus") if f.severity is Severity.WARNING]
    assert ["node 0" in findings[0].what, "node 1" in findings[1].what] == [True, True]


def test_prepared_huge_pages_do_not_make_a_gpus_node_short(tmp_path: Path) -> None:
    tree = host_trees.two_socket_8gpu(
        tmp_path, free_bytes_per_node=8 * GIB, huge_2mi_per_node=256 * 1024
    )
    assert _of(_facts(tree), "gpus")[0].severity is Severity.OK


@pytest.mark.parametrize(
    ("page_bytes", "severity"), [(4 * KIB, Severity.OK), (64 * KIB, Severity.WARNING)]
)
def test_64_kib_pages_on_arm64_are_a_warning(
    tmp_path: Path, page_bytes: int, severity: Severity
) -> None:
    facts = _facts(host_trees.gb200(tmp_path, page_bytes=page_bytes))
    assert _of(facts, "base-pages")[0].severity is severity


def test_without_root_it_says_what_root_would_add(tmp_path: Path) -> None:
    finding = _one(_facts(host_trees.small(tmp_path, euid=1000)), "privileges", Severity.WARNING)
    assert "huge pages" in finding.what
    assert finding.remedy.startswith("sudo")


def test_a_container_of_its_own_pids_cannot_scrub(new: Facts) -> None:
    facts = replace(new, process=replace(new.process, sees_all_processes=False))
    assert "hostPID: true" in _one(facts, "privileges", Severity.WARNING).remedy


@pytest.mark.parametrize(
    ("change", "severity"),
    [
        ({"refused": "/run/hostprep belongs to user 1000"}, Severity.ERROR),
        ({"writable": False}, Severity.ERROR),
        ({"fs_type": "ext4"}, Severity.WARNING),
        ({"fs_type": "ext4", "exists": False}, Severity.OK),  # it gets a tmpfs of its own
        ({"free_bytes": 4096}, Severity.ERROR),
        ({}, Severity.OK),
    ],
)
def test_the_root_folder_is_judged(new: Facts, change: dict[str, Any], severity: Severity) -> None:
    usual = RootFacts(
        path="/run/hostprep", exists=True, fs_type="tmpfs", writable=True, free_bytes=1 << 20
    )
    root = replace(usual, **change)
    assert _of(replace(new, root=root), "root-folder")[0].severity is severity


@pytest.mark.parametrize(
    ("unshared", "is_enforcing", "severity"),
    [
        ("", True, Severity.OK),
        ("", None, Severity.OK),
        ("/run/hostprep (system_u:object_r:var_run_t:s0)", True, Severity.ERROR),
        ("/run/hostprep (system_u:object_r:var_run_t:s0)", None, Severity.WARNING),
        ("/run/hostprep (system_u:object_r:var_run_t:s0)", False, Severity.INFO),
    ],
)
def test_labels_that_keep_containers_out_are_judged_by_whether_selinux_enforces(
    new: Facts, unshared: str, is_enforcing: bool | None, severity: Severity
) -> None:
    root = replace(new.root, unshared=unshared, is_enforcing=is_enforcing)
    (found,) = _of(replace(new, root=root), "selinux")
    assert found.severity is severity
    assert not unshared or "chcon -R -t container_file_t -l s0 /run/hostprep" in found.remedy


def _pool(
    facts: Facts, *, backing: Backing, size_bytes: int, boot_id: str | None = None
) -> PoolFacts:
    region = RegionFacts(
        name="node0-0",
        mount_dir="mem",
        backing=backing,
        placement=Placement(0),
        size_bytes=size_bytes,
        resident_bytes=size_bytes,
        device=1,
        inode=2,
        gid=0,
        mode=0o660,
        finished=True,
        leased=False,
        clean=True,
    )
    return PoolFacts(
        name="kv",
        boot_id=boot_id or facts.kernel.boot_id,
        generation=1,
        published=True,
        regions=(region,),
        taken=(),
        mounts=(),
    )


def test_a_handoff_of_another_boot_is_told(new: Facts) -> None:
    pool = _pool(new, backing=Backing.BASE, size_bytes=MIB, boot_id="another")
    finding = _one(replace(new, pools=(pool,)), "pools", Severity.WARNING)
    assert "another boot" in finding.what


def test_a_damaged_region_is_an_error(new: Facts) -> None:
    pool = _pool(new, backing=Backing.BASE, size_bytes=MIB)
    damaged = replace(pool.regions[0], damage="has a bad page")
    facts = replace(new, pools=(replace(pool, regions=(damaged,)),))
    assert "kv/node0-0" in _one(facts, "pools", Severity.ERROR).what


def test_memory_that_no_handoff_names_is_a_warning(new: Facts) -> None:
    pool = replace(_pool(new, backing=Backing.BASE, size_bytes=MIB), published=False)
    assert _of(replace(new, pools=(pool,)), "pools")[0].severity is Severity.WARNING


def test_base_pages_cost_eight_bytes_each_for_every_rank(new: Facts) -> None:
    pool = _pool(new, backing=Backing.BASE, size_bytes=1024 * GIB)
    finding = _one(replace(new, pools=(pool,)), "page-tables", Severity.WARNING)
    assert "2 GiB of page tables" in finding.what
    assert "16 GiB with 8 ranks" in finding.what


def test_huge_pages_cost_no_page_tables(new: Facts) -> None:
    pool = _pool(new, backing=Backing.HUGETLB_2MI, size_bytes=1024 * GIB)
    assert _of(replace(new, pools=(pool,)), "page-tables") == []


def test_probes_that_failed_are_passed_on(new: Facts) -> None:
    facts = replace(new, warnings=("/proc/zoneinfo cannot be read",))
    assert "/proc/zoneinfo" in _one(facts, "probes", Severity.WARNING).what


def test_a_pool_that_fits_is_told_with_its_backing(new: Facts) -> None:
    spec = spec_from_options(name="kv", size="1Ti", backings="HugeTLB2Mi")
    finding = next(f for f in diagnose(new, (spec,)) if f.check == "plan")
    assert (finding.severity, finding.what) == (
        Severity.OK,
        "kv: 1 TiB can be had in HugeTLB2Mi",
    )


def test_a_pool_that_does_not_fit_leads_with_what_would(new: Facts) -> None:
    spec = spec_from_options(name="kv", size="1900Gi", reserve="200Gi", backings="HugeTLB2Mi")
    first = diagnose(new, (spec,))[0]
    assert (first.severity, first.check) == (Severity.ERROR, "plan")
    assert first.remedy.startswith("ask for ")


def test_a_backing_that_is_passed_over_is_told_with_the_cost_of_the_next(tmp_path: Path) -> None:
    spec = spec_from_options(name="kv", size="100Gi", backings="HugeTLB2Mi,Base")
    findings = diagnose(_facts(host_trees.fragmented(tmp_path)), (spec,))
    told = {finding.check: finding for finding in findings if finding.what.startswith("kv")}
    assert "kv: HugeTLB2Mi is passed over" in next(
        f.what for f in findings if f.check == "plan" and f.severity is Severity.WARNING
    )
    assert "200 MiB of page tables" in told["page-tables"].what


def test_a_finding_prints_with_its_remedy_below(new: Facts) -> None:
    shown = str(Finding(Severity.WARNING, "swap", "swap is on", "swapoff -a"))
    assert shown == "warning  swap: swap is on\n         -> swapoff -a"
    assert str(_of(new, "swap")[0]).count("\n") == 0


def test_pages_that_the_hardware_reported_are_told(healthy: Facts) -> None:
    assert _one(healthy, "bad-memory", Severity.OK)
    bad = replace(healthy, memory=replace(healthy.memory, corrupted_bytes=8192))
    found = _one(bad, "bad-memory", Severity.WARNING)
    assert "8 KiB" in found.what
    assert "verify --pages" in found.remedy
