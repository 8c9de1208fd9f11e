"""What kubelet is told of regions, and what containers get: no socket, no file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.agent.devices import DevicePool, devices_of
from hostprep.backing import Backing
from hostprep.client.handoff import Region
from hostprep.deviceplugin.devices import (
    Device,
    device_of,
    preferred,
    resource_name,
    socket_name,
)
from hostprep.deviceplugin.plugin import allocation_of
from hostprep.deviceplugin.views import view_name
from hostprep.errors import BadInputError
from hostprep.paths import PoolPaths
from tests.support.agent_values import pool_observation, region

pytestmark = pytest.mark.unit

PLUGINS = "/var/lib/kubelet/device-plugins"
NAMES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
REGIONS = st.sets(st.from_regex(r"node[0-9]-[0-9]{1,2}", fullmatch=True), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("state", "healthy"),
    [
        ("Free", True),
        ("Leased", True),
        ("Retained", True),
        ("Dirty", False),
        ("Damaged", False),
        ("Unpublished", False),
        ("Unfinished", False),
        ("SomethingNew", False),
    ],
)
def test_health_follows_the_region(state: str, healthy: bool) -> None:
    device = device_of(region(state=state))
    assert device.healthy is healthy
    assert device.health == ("Healthy" if healthy else "Unhealthy")


def test_a_dirty_region_that_is_scrubbed_on_claim_can_be_had() -> None:
    """Otherwise nobody would ever claim it, and nobody ever scrub it."""
    waits = device_of(region(state="Dirty"), scrubbed_on_claim=True)
    assert waits.healthy


@pytest.mark.parametrize(
    ("placement", "node"), [("node:0", 0), ("node:17", 17), ("interleave", None)]
)
def test_the_numa_node_is_the_placements(placement: str, node: int | None) -> None:
    device = device_of(region(placement=placement))
    assert device.numa_node == node


def test_a_finished_region_hides_its_half_made_namesake() -> None:
    for regions in (
        [region(state="Unfinished"), region(state="Free")],
        [region(state="Free"), region(state="Unfinished")],
    ):
        (device,) = devices_of(DevicePool(pool_observation(*regions)))
        assert device.healthy


def test_a_pool_that_cannot_be_looked_at_keeps_its_devices_and_offers_none() -> None:
    before = devices_of(DevicePool(pool_observation(region(), region("node0-1"))))
    after = devices_of(DevicePool(pool_observation(failure="cannot be looked at")), before)
    assert [device.name for device in after] == ["node0-0", "node0-1"]
    assert not any(device.healthy for device in after)


DEVICES = {
    name: Device(name, healthy=True, numa_node=node, leased=leased)
    for name, node, leased in [
        ("a0", 0, False),
        ("a1", 0, False),
        ("a2", 0, True),
        ("b0", 1, False),
        ("b1", 1, False),
        ("b2", 1, False),
        ("x", None, False),
    ]
}


@pytest.mark.parametrize(
    ("available", "must", "count", "chosen"),
    [
        (["a0", "b0"], [], 1, {"a0"}),
        (["a2", "b0"], [], 1, {"b0"}),  # whoever holds a2, kubelet does not know of it
        (["a2"], [], 1, {"a2"}),
        (["a0", "b0", "b1"], [], 2, {"b0", "b1"}),
        (["a0", "a1", "b0", "b1", "b2"], [], 2, {"a0", "a1"}),  # the fewest to spare
        (["a0", "b0", "b1"], ["a1"], 2, {"a1", "a0"}),
        (["a0", "b0"], ["b1"], 2, {"b1", "b0"}),
        (["a0", "b0"], [], 2, {"a0", "b0"}),
        (["x", "gone"], [], 1, {"x"}),
        ([], [], 1, set()),
    ],
)
def test_what_is_preferred(
    available: list[str], must: list[str], count: int, chosen: set[str]
) -> None:
    got = preferred(DEVICES, [*available, *must], must_include=must, count=count)
    assert set(got) == chosen
    assert len(got) == len(set(got))


@given(
    available=st.lists(st.sampled_from([*DEVICES, "gone"]), unique=True),
    must=st.integers(0, 3),
    count=st.integers(0, 8),
)
def test_the_preferred_are_available_and_hold_what_must_be_included(
    available: list[str], must: int, count: int
) -> None:
    included = available[:must]
    got = preferred(DEVICES, available, must_include=included, count=count)
    assert set(got) <= set(available)
    assert len(got) == len(set(got)) == min(count, len(available))
    assert set(included[:count]) <= set(got)


@given(NAMES)
def test_every_pools_socket_fits_and_is_its_own(pool: str) -> None:
    name = socket_name(PLUGINS, pool)
    assert len(f"{PLUGINS}/{name}".encode()) <= 107
    assert "/" not in name
    assert len(resource_name(pool).rpartition("/")[2]) <= 63


def test_long_names_that_begin_alike_have_sockets_apart() -> None:
    names = {socket_name(PLUGINS, "a" * 62 + end) for end in "bcd"}
    assert len(names) == 3


def test_a_folder_that_is_too_deep_is_refused_with_the_remedy() -> None:
    with pytest.raises(BadInputError, match="too long") as caught:
        socket_name("/" + "k" * 100, "kv")
    assert "--root-dir" in (caught.value.remedy or "")


@given(REGIONS)
def test_a_set_of_regions_has_one_view_whatever_the_order(names: set[str]) -> None:
    assert view_name(sorted(names)) == view_name(sorted(names, reverse=True))
    assert len(view_name(names)) <= 255
    assert "/" not in view_name(names)


def test_many_regions_still_have_a_name() -> None:
    names = [f"node0-{number}" for number in range(200)]
    assert len(view_name(names)) <= 255
    assert view_name(names) != view_name(names[1:])


def _region(name: str, path: str = "") -> Region:
    return Region(
        name=name,
        path=path or f"mem/{name}",
        st_dev=1,
        st_ino=2,
        size_bytes=4096,
        backing=Backing.BASE,
        page_bytes=4096,
        placement="node:0",
        pinned=True,
    )


@given(REGIONS, st.booleans())
def test_an_allocation_holds_these_regions_and_nothing_else_of_the_pool(
    names: set[str], turns: bool
) -> None:
    paths = PoolPaths("/run/hostprep", "kv")
    regions = [_region(name) for name in sorted(names)]
    got = allocation_of(paths, regions, turns=turns)

    hosts = {mount.host_path for mount in got.mounts}
    assert paths.folder not in hosts
    assert paths.mem not in hosts
    assert paths.state not in hosts
    files = {path.rpartition("/")[2] for path in hosts if path.startswith(f"{paths.mem}/")}
    assert files == names
    assert {p.rpartition("/")[2] for p in hosts if p.startswith(f"{paths.state}/")} == names
    containers = [mount.container_path for mount in got.mounts]
    assert len(set(containers)) == len(containers)
    depths = [path.count("/") for path in containers]
    assert depths == sorted(depths), "a runtime that does not sort mounts would hide the deep ones"
    writable = {mount.container_path for mount in got.mounts if not mount.read_only}
    assert paths.folder not in writable
    assert (f"{paths.root}/turnstile" in writable) == turns
    assert f"{paths.root}/hostprep.pyz" not in writable


def test_the_variables_name_the_regions() -> None:
    paths = PoolPaths("/run/hostprep", "kv")
    regions = [_region("node0-0"), _region("node1-0", "mem-base/node1-0")]
    got = allocation_of(paths, regions)
    assert dict(got.envs) == {
        "HOSTPREP_ROOT": "/run/hostprep",
        "HOSTPREP_POOL": "kv",
        "HOSTPREP_REGION": "node0-0:node1-0",
    }
    assert "/run/hostprep/kv/mem-base/node1-0" in [mount.container_path for mount in got.mounts]
