"""Where a process is charged, by cgroup version, namespace and mount."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import GIB, MIB
from hostprep.node.facts import CgroupFacts
from hostprep.node.observe import HostRoot, observe
from hostprep.node.observe.cgroups import observe_cgroup, parse_own_paths
from hostprep.node.observe.host import read_mounts
from tests.support import host_trees

pytestmark = pytest.mark.unit


def _cgroup_of(tree: Path, euid: int = 0) -> CgroupFacts:
    host = HostRoot(tree)
    warnings: list[str] = []
    mounts = read_mounts(host, warnings.append)
    return observe_cgroup(host, mounts, euid, warnings.append)


def _write(tree: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    return tree


def test_a_container_is_limited_by_the_tightest_folder_above_it(tmp_path: Path) -> None:
    tree = host_trees.kubepod(tmp_path, memory_limit_bytes=32 * GIB)
    (tree / "sys/fs/cgroup/kubepods.slice/memory.max").write_text(f"{8 * GIB}\n")
    cgroup = _cgroup_of(tree)
    assert cgroup.version == 2
    assert cgroup.in_kubepods
    assert cgroup.memory_limit_bytes == 8 * GIB


def test_a_pod_without_huge_pages_has_a_limit_of_zero_for_each_size(tmp_path: Path) -> None:
    cgroup = _cgroup_of(host_trees.kubepod(tmp_path))
    assert cgroup.hugetlb_limit_bytes == ((2 * MIB, 0), (GIB, 0))


def test_a_reservation_limit_counts_like_a_usage_limit(tmp_path: Path) -> None:
    tree = host_trees.two_socket_8gpu(tmp_path)
    scope = tree / "sys/fs/cgroup/user.slice/user-0.slice/session-3.scope"
    (scope / "hugetlb.2MB.rsvd.max").write_text(f"{4 * MIB}\n")
    assert _cgroup_of(tree).hugetlb_limit_bytes == ((2 * MIB, 4 * MIB),)


def test_of_usage_and_reservation_limits_the_lower_one_counts(tmp_path: Path) -> None:
    tree = host_trees.two_socket_8gpu(tmp_path)
    own = "sys/fs/cgroup/user.slice/user-0.slice/session-3.scope/hugetlb"
    above = "sys/fs/cgroup/user.slice/hugetlb"
    _write(
        tree,
        {
            f"{own}.2MB.max": f"{2 * MIB}\n",
            f"{own}.2MB.rsvd.max": f"{6 * MIB}\n",
            f"{own}.1GB.max": f"{2 * GIB}\n",
            f"{above}.2MB.max": f"{8 * MIB}\n",
            f"{above}.1GB.max": f"{GIB}\n",
        },
    )
    assert _cgroup_of(tree).hugetlb_limit_bytes == ((2 * MIB, 2 * MIB), (GIB, GIB))


def test_max_is_no_limit(tmp_path: Path) -> None:
    cgroup = _cgroup_of(host_trees.two_socket_8gpu(tmp_path))
    assert cgroup.memory_limit_bytes is None
    assert cgroup.hugetlb_limit_bytes == ()
    assert cgroup.writable


def test_memory_on_version_1_is_seen_beside_a_unified_hierarchy(tmp_path: Path) -> None:
    cgroup = _cgroup_of(host_trees.small(tmp_path))
    assert (cgroup.version, cgroup.path) == (1, "/init/worker")
    assert cgroup.memory_limit_bytes == 20 * GIB
    assert cgroup.writable


def test_a_cgroup_namespace_never_looks_like_the_top(tmp_path: Path) -> None:
    cgroup = _cgroup_of(host_trees.kubepod(tmp_path, privileged=False))
    assert cgroup.path == "/"
    assert cgroup.namespaced
    assert not cgroup.is_top
    assert cgroup.memory_limit_bytes == 16 * GIB
    assert not cgroup.writable


def test_without_root_no_host_level_cgroup_can_be_made(tmp_path: Path) -> None:
    assert not _cgroup_of(host_trees.two_socket_8gpu(tmp_path), euid=1000).writable


def test_a_bind_mount_of_the_own_folder_is_that_folder(tmp_path: Path) -> None:
    tree = _write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/kubepods/pod1/c1/sub\n4:hugetlb:/kubepods/pod1/c1\n",
            "proc/self/mountinfo": (
                "9 8 0:3 /kubepods/pod1/c1 /cg/memory ro - cgroup cgroup rw,memory\n"
                "9 8 0:4 /kubepods/pod1/c1 /cg/hugetlb ro - cgroup cgroup rw,hugetlb\n"
            ),
            "cg/memory/memory.limit_in_bytes": "1048576\n",
            "cg/memory/sub/memory.limit_in_bytes": "524288\n",
            "cg/hugetlb/hugetlb.2MB.limit_in_bytes": "9223372036854771712\n",
            "cg/hugetlb/hugetlb.1GB.limit_in_bytes": "0\n",
        },
    )
    cgroup = _cgroup_of(tree)
    assert (cgroup.version, cgroup.memory_limit_bytes) == (1, 524288)
    assert cgroup.hugetlb_limit_bytes == ((GIB, 0),)
    assert cgroup.in_kubepods
    assert not cgroup.writable


def test_a_path_outside_what_is_mounted_falls_back_to_the_mount(tmp_path: Path) -> None:
    tree = _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../other/../..\n",
            "proc/self/mountinfo": "9 8 0:3 / /cg rw - cgroup2 cgroup rw\n",
            "cg/cgroup.controllers": "memory\n",
            "cg/memory.max": "4096\n",
        },
    )
    assert _cgroup_of(tree).memory_limit_bytes == 4096


def test_no_cgroup_at_all_is_version_0_with_a_warning(tmp_path: Path) -> None:
    facts = observe(host=HostRoot(tmp_path), root=str(tmp_path))
    assert facts.cgroup.version == 0
    assert any("cgroup" in warning for warning in facts.warnings)


@given(st.text())
def test_no_text_of_own_cgroups_raises(text: str) -> None:
    parse_own_paths(text)


@given(
    st.dictionaries(
        st.sampled_from(["memory", "cpu,cpuacct", "name=systemd", "hugetlb"]),
        st.text(st.characters(exclude_characters="\n")).map("/{}".format),
    )
)
def test_own_cgroups_read_back(paths: dict[str, str]) -> None:
    text = "".join(f"{n}:{names}:{path}\n" for n, (names, path) in enumerate(paths.items(), 1))
    expected = {name: path for names, path in paths.items() for name in names.split(",")}
    assert parse_own_paths(text + "0::/own\n") == expected | {"": "/own"}
