"""Readers of kernel text: exact on what the kernel prints, silent on anything else."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hostprep.linux.procfs import (
    MAX_CPUS,
    parse_bracketed,
    parse_cpu_list,
    parse_huge_folder,
    parse_int,
    parse_keyed,
    parse_meminfo,
    parse_pod_uid,
)
from hostprep.node.observe.node import parse_auxv_page_bytes, parse_memlock, parse_version

pytestmark = pytest.mark.unit

_KEYS = st.from_regex(r"[A-Z][A-Za-z_]{0,15}(\((anon|file)\))?", fullmatch=True)


def _cpu_list(cpus: set[int]) -> str:
    """Print CPUs as the kernel does: ranges where neighbours follow each other."""
    parts: list[tuple[int, int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1] = (parts[-1][0], cpu)
        else:
            parts.append((cpu, cpu))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


@given(st.sets(st.integers(0, MAX_CPUS - 1), max_size=64))
def test_a_cpu_list_reads_back_what_was_printed(cpus: set[int]) -> None:
    assert parse_cpu_list(_cpu_list(cpus) + "\n") == tuple(sorted(cpus))


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", (0, 1, 2, 3, 8)), ("\n", ()), ("5", (5,)), ("1,0-1", (0, 1))]
)
def test_a_cpu_list_has_ranges_single_cpus_or_nothing(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus


@pytest.mark.parametrize("text", ["3-1", "a", "1-", "-1", "1,,2", "0-999999", "0-99999999999", "٣"])
def test_a_broken_cpu_list_is_none(text: str) -> None:
    assert parse_cpu_list(text) is None


@given(st.text())
@example("9" * 5000)
@example("0x" + "f" * 5000)
def test_no_reader_of_small_texts_ever_raises(text: str) -> None:
    parse_int(text)
    parse_cpu_list(text)
    parse_meminfo(text)
    parse_keyed(text)
    parse_bracketed(text)
    parse_huge_folder(text)
    parse_version(text)
    parse_memlock(text)


@given(st.integers(-(10**19), 2**64 - 1))
def test_a_number_reads_back(number: int) -> None:
    assert parse_int(str(number)) == number


@given(st.integers(0, 2**64 - 1))
def test_a_hexadecimal_number_reads_back(number: int) -> None:
    assert parse_int(f"0x{number:04x}") == number


@given(st.dictionaries(_KEYS, st.integers(0, 2**50)), st.sampled_from(["", "Node 3 "]))
def test_meminfo_reads_back_in_bytes(entries: dict[str, int], prefix: str) -> None:
    text = "".join(f"{prefix}{key}:   {kib:>8} kB\n" for key, kib in entries.items())
    assert parse_meminfo(text) == {key: kib * 1024 for key, kib in entries.items()}


def test_counts_in_meminfo_are_not_multiplied() -> None:
    assert parse_meminfo("HugePages_Total:       7\nbroken\nShmem: x kB\n") == {
        "HugePages_Total": 7
    }


def test_the_bracketed_word_is_the_active_choice() -> None:
    assert parse_bracketed("always defer [defer+madvise] madvise never\n") == "defer+madvise"


def test_a_huge_page_folder_tells_its_size_in_bytes() -> None:
    assert parse_huge_folder("hugepages-1048576kB") == 1 << 30


@pytest.mark.parametrize(
    ("release", "version"),
    [
        ("6.18.44-generic", (6, 18)),
        ("5.10.0-32-amd64", (5, 10)),
        ("6.9-rc1", (6, 9)),
        ("linux", None),
        ("6", None),
    ],
)
def test_a_release_tells_major_and_minor(release: str, version: tuple[int, int] | None) -> None:
    assert parse_version(release) == version


@given(st.binary(max_size=200))
def test_no_auxiliary_vector_raises(auxv: bytes) -> None:
    parse_auxv_page_bytes(auxv)


def test_the_auxiliary_vector_tells_the_page_size() -> None:
    auxv = struct.pack("=QQQQQQ", 16, 7, 6, 65536, 0, 0)
    assert parse_auxv_page_bytes(auxv) == 65536
    assert parse_auxv_page_bytes(struct.pack("=QQ", 6, 12345)) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [("unlimited", (True, None)), ("8388608", (True, 8388608)), ("lots", (False, 0))],
)
def test_the_limit_of_locked_memory_is_the_soft_one(
    value: str, expected: tuple[bool, int | None]
) -> None:
    assert parse_memlock(f"Max locked memory         {value:<21}9999999  bytes \n") == expected


@pytest.mark.parametrize(
    ("line", "uid"),
    [
        (
            "0::/kubepods.slice/kubepods-pod3f0e9d2c_1111_2222_3333_0123456789ab.slice/cri-a.scope",
            "3f0e9d2c-1111-2222-3333-0123456789ab",
        ),
        (
            "11:memory:/kubepods/pod3f0e9d2c-1111-2222-3333-0123456789ab/aabb\n",
            "3f0e9d2c-1111-2222-3333-0123456789ab",
        ),
        ("0::/system.slice/podman.service", None),
        ("0::/podcast-3f0e9d2c", None),
        ("", None),
    ],
)
def test_the_pod_of_a_cgroup(line: str, uid: str | None) -> None:
    assert parse_pod_uid(line) == uid
