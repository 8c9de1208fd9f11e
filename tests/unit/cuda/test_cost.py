"""What registering takes, and which known faults it meets: pure arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.backing import GIB, KIB, MIB
from hostprep.cuda.cost import registration_cost
from hostprep.errors import BadInputError
from hostprep.known_issues import known_issues_of, parse_driver_version

pytestmark = pytest.mark.unit

TIB = 1 << 40
PROC = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  "
    "(dvs-builder@U22-I3-AM02-24-3)  Sun Jul 27 07:08:34 UTC 2025\n"
    "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n"
)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("580.65.06", (580, 65, 6)),
        ("535.183", (535, 183)),
        (PROC, (580, 65, 6)),
        ("GCC version:  gcc version 12.3.0", None),
        ("1580.65.06", None),
        ("580.65.06.1", None),
        ("", None),
        (None, None),
    ],
)
def test_driver_release(text: str | None, version: tuple[int, ...] | None) -> None:
    assert parse_driver_version(text) == version


@given(st.text(max_size=60))
def test_any_text_is_a_release_or_none(text: str) -> None:
    version = parse_driver_version(text)
    assert version is None or len(version) in (2, 3)


def test_a_tebibyte_by_eight_processes_is_what_the_source_says() -> None:
    """memory.md 1.4: 32 bytes a page and registration, 64 GiB; 2 MiB of the GPU for each GiB."""
    cost = registration_cost(TIB, page_bytes=2 * MIB, processes=8, driver_version="580.65.06")
    assert cost.kernel_bytes == 64 * GIB
    assert cost.vram_bytes_per_gpu == 2 * GIB
    assert cost.vram_bytes == 16 * GIB
    assert cost.page_table_bytes == 0


def test_base_pages_cost_each_process_its_page_tables() -> None:
    base = registration_cost(GIB, page_bytes=4 * KIB, processes=4)
    huge = registration_cost(GIB, page_bytes=2 * MIB, processes=4)
    assert base.page_table_bytes == 4 * 2 * MIB
    assert huge.page_table_bytes == 0
    assert (base.kernel_bytes, base.vram_bytes) == (huge.kernel_bytes, huge.vram_bytes)


def test_older_drivers_cost_the_kernel_more_and_say_it_is_a_least() -> None:
    old = registration_cost(GIB, page_bytes=2 * MIB, driver_version="570.86.10")
    new = registration_cost(GIB, page_bytes=2 * MIB, driver_version="580.65.06")
    unknown = registration_cost(GIB, page_bytes=2 * MIB)
    assert old.kernel_bytes > new.kernel_bytes == unknown.kernel_bytes
    assert any("before 580" in note for note in old.notes)
    assert any("unknown" in note for note in unknown.notes)


def test_64_kib_base_pages_pin_fewer_pages() -> None:
    small = registration_cost(GIB, page_bytes=64 * KIB, base_page_bytes=64 * KIB)
    assert small.kernel_bytes < registration_cost(GIB, page_bytes=4 * KIB).kernel_bytes
    assert small.vram_bytes == 2 * MIB
    assert small.page_table_bytes == GIB // (64 * KIB) * 8


@given(pages=st.integers(1, 1 << 20), gpus=st.integers(1, 16), processes=st.integers(1, 16))
def test_cost_grows_with_each_of_its_causes(pages: int, gpus: int, processes: int) -> None:
    def of(size: int, gpus: int, processes: int) -> tuple[int, int]:
        cost = registration_cost(size, page_bytes=2 * MIB, gpus=gpus, processes=processes)
        return cost.kernel_bytes, cost.vram_bytes

    size = pages * 2 * MIB
    alone = of(size, 1, 1)
    assert of(size, gpus, processes) == tuple(part * gpus * processes for part in alone)
    assert of(2 * size, 1, 1) == tuple(2 * part for part in alone)


@pytest.mark.parametrize(
    ("size", "page", "gpus", "processes"),
    [
        (0, 4096, 1, 1),
        (-4096, 4096, 1, 1),
        (4096, 4096, 0, 1),
        (4096, 4096, 1, 0),
        (4096, 3000, 1, 1),
        (4096, 0, 1, 1),
        (3 * MIB, 2 * MIB, 1, 1),
    ],
)
def test_nonsense_is_refused_with_a_remedy(size: int, page: int, gpus: int, processes: int) -> None:
    with pytest.raises(BadInputError) as refused:
        registration_cost(size, page_bytes=page, gpus=gpus, processes=processes)
    assert refused.value.remedy


def names(**changes: object) -> dict[str, str]:
    known: dict[str, object] = {
        "size_bytes": 64 * GIB,
        "chunk_bytes": 256 * MIB,
        "kernel_release": "6.8.0",
        "driver_version": "580.65.06",
    }
    found = known_issues_of(**(known | changes))  # type: ignore[arg-type]
    assert all(fault.what and fault.remedy for fault in found)
    order = ["error", "warning", "info"]
    assert [fault.severity for fault in found] == sorted(
        (fault.severity for fault in found), key=order.index
    )
    return {fault.name: fault.severity for fault in found}


def test_nothing_is_said_where_nothing_is_known_to_be_wrong() -> None:
    assert names() == {}
    assert names(kernel_release=None, driver_version=None) == {}


@pytest.mark.parametrize("release", ["6.11.0-19-generic", "6.12.9", "6.13.0-rc1"])
def test_kernels_that_refuse_long_pins(release: str) -> None:
    assert names(kernel_release=release) == {"LongTermPinLimit": "info"}
    whole = names(kernel_release=release, chunk_bytes=None)
    assert whole["LongTermPinLimit"] == "error"
    assert names(kernel_release=release, size_bytes=GIB) == {}


@pytest.mark.parametrize("release", ["6.10.14", "6.14.0", "7.0.0", "5.15.0", "nonsense"])
def test_kernels_that_do_not(release: str) -> None:
    assert "LongTermPinLimit" not in names(kernel_release=release, chunk_bytes=None)


def test_calls_of_512_gib_fail_from_580_on() -> None:
    assert names(size_bytes=512 * GIB) == {"SingleCallLimit": "info"}
    assert names(size_bytes=512 * GIB, chunk_bytes=None)["SingleCallLimit"] == "error"
    assert names(size_bytes=512 * GIB, driver_version=None) == {"SingleCallLimit": "info"}
    assert "SingleCallLimit" not in names(size_bytes=511 * GIB, chunk_bytes=None)
    assert names(size_bytes=TIB, driver_version="575.57.08") == {}


def test_calls_of_512_mib_may_stall_the_node() -> None:
    assert names(chunk_bytes=512 * MIB) == {"LargeCall": "warning"}
    assert names(chunk_bytes=480 * MIB) == {}
    assert names(chunk_bytes=GIB, size_bytes=256 * MIB) == {}


def test_drivers_before_565_hold_their_lock() -> None:
    assert names(driver_version="560.35.03") == {"ExclusiveLock": "warning"}
    assert names(driver_version="565.57.01") == {}


def test_64_kib_pages_on_arm() -> None:
    arm = {"arch": "aarch64", "base_page_bytes": 64 * KIB}
    assert names(**arm, driver_version="595.45.04") == {"LargeArmPages": "warning"}
    assert names(**arm, driver_version="580.65.06") == {}
    assert names(**arm, driver_version="595.45.04", size_bytes=2 * GIB) == {}
    assert names(base_page_bytes=64 * KIB, driver_version="595.45.04") == {}


def test_zones_and_limits() -> None:
    assert names(movable_bytes=GIB) == {
        "MovableZone": "warning",
    }
    assert names(memlock_limit_bytes=8 * MIB) == {"LockedMemoryLimit": "info"}
    assert names(memlock_limit_bytes=64 * GIB) == {}


def test_worst_comes_first() -> None:
    found = names(
        size_bytes=TIB,
        chunk_bytes=None,
        movable_bytes=GIB,
        memlock_limit_bytes=1,
        kernel_release="6.12.0",
    )
    assert list(found.values())[:2] == ["error", "error"]
    assert list(found.values())[-1] == "info"
