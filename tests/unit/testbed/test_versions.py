"""Pinned versions, and what counts as one of them."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from hostprep.errors import BadInputError, FailedError, HostprepError
from testbed import go_programs as go_build
from testbed.binaries import ALL, NEWEST, NODE, given
from testbed.go_programs import GO_NEEDED, cache_name, pinned_requirement
from testbed.versions import (
    DEFAULT_KUBERNETES,
    KUBERNETES_VERSIONS,
    NODE_PROGRAMS,
    go_programs,
    go_version,
    kubernetes_version,
)

pytestmark = pytest.mark.unit
_MODULES = Path(__file__).parents[3] / "testbed" / "modules"


@pytest.mark.parametrize("wanted", [None, "", "1.36", "1.36.3", "v1.36.3"])
def test_the_default_kubernetes_has_many_names(wanted: str | None) -> None:
    assert kubernetes_version(wanted) == DEFAULT_KUBERNETES == "1.36.3"


def test_the_newest_and_the_oldest_kubernetes_can_be_asked_for() -> None:
    assert kubernetes_version("newest") == KUBERNETES_VERSIONS[0] == "1.37.2"
    assert kubernetes_version("oldest") == KUBERNETES_VERSIONS[-1]


@pytest.mark.parametrize("wanted", ["1.2", "1.36.4", "36", "latest", "1.36.3; rm"])
def test_a_kubernetes_that_is_not_pinned_is_refused_with_the_choices(wanted: str) -> None:
    with pytest.raises(BadInputError, match=r"choose one of 1\.37, 1\.36, 1\."):
        kubernetes_version(wanted)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("go1.26.8\n", (1, 26, 8)), ("1.26", (1, 26, 0)), ("go1.27rc1", (1, 27, 0))],
)
def test_go_versions_are_read(text: str, numbers: tuple[int, int, int]) -> None:
    assert go_version(text) == numbers


@for_all(st.text(max_size=12))
def test_what_is_no_version_of_go_is_refused_and_nothing_else_happens(text: str) -> None:
    with suppress(HostprepError):
        assert len(go_version(text)) == 3


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_program_has_a_module_that_pins_its_version_and_sums(version: str) -> None:
    for program in go_programs(version).values():
        if program.name == "channel":
            continue  # ours, and of the standard library alone: nothing to pin
        module = (_MODULES / program.module / "go.mod").read_text()
        assert f"v{program.version}" in module
        assert f" v{program.version} h1:" in (_MODULES / program.module / "go.sum").read_text()


def test_the_go_that_is_looked_for_can_build_every_module() -> None:
    lines = [
        line.split()[1]
        for path in _MODULES.glob("*/go.mod")
        for line in path.read_text().splitlines()
        if line.startswith("go ")
    ]
    assert max(go_version(line) for line in lines) <= GO_NEEDED


def test_another_version_or_other_flags_are_another_folder_in_the_cache() -> None:
    names = {
        cache_name(program)
        for version in KUBERNETES_VERSIONS
        for program in go_programs(version).values()
    }
    # Etcd, Karpenter, the registry, the oldest helm and the node's programs are the same for both.
    assert len(names) == 3 * len(KUBERNETES_VERSIONS) + 4 + len(NODE_PROGRAMS)


def test_other_tags_and_c_in_it_are_another_folder_in_the_cache() -> None:
    plain = go_programs(KUBERNETES_VERSIONS[0])["etcd"]
    other = {cache_name(replace(plain, **field)) for field in ({"tags": "a"}, {"cgo": True})}
    assert len({cache_name(plain), *other}) == 3


def test_our_own_source_is_part_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(_MODULES / "channel", tmp_path / "channel")
    monkeypatch.setattr(go_build, "_MODULES", tmp_path)
    program = go_programs(KUBERNETES_VERSIONS[0])["channel"]
    before = cache_name(program)
    with open(tmp_path / "channel" / "main.go", "a", encoding="ascii") as file:
        file.write("// changed\n")
    assert cache_name(program) != before


def test_the_node_tier_wants_every_program_of_the_node_and_names_them_once() -> None:
    assert set(NODE_PROGRAMS) <= set(NODE)
    assert len(set(NODE)) == len(NODE)
    assert not set(NODE_PROGRAMS) & set(ALL)


def test_the_cluster_tier_wants_the_newest_api_server_beside_its_own() -> None:
    assert kubernetes_version("newest") != DEFAULT_KUBERNETES
    assert set(NEWEST) < set(ALL)


def test_programs_that_the_user_brings_come_first(tmp_path: Path) -> None:
    (tmp_path / "etcd").touch(mode=0o755)
    assets = {"KUBEBUILDER_ASSETS": str(tmp_path)}
    assert given("etcd", assets) == tmp_path / "etcd"
    assert given("kube-apiserver", assets) is None
    one = {**assets, "TEST_ASSET_ETCD": "/elsewhere/etcd"}
    assert given("etcd", one) == Path("/elsewhere/etcd")
    assert given("kube-apiserver", {"TEST_ASSET_KUBE_APISERVER": "/a"}) == Path("/a")


def test_a_pin_is_found_with_all_its_hashes() -> None:
    pins = "one==1 \\\n    --hash=sha256:a\ntwo==2 \\\n    --hash=sha256:b \\\n  --hash=sha256:c\n"
    assert pinned_requirement("two", pins) == "two==2 --hash=sha256:b --hash=sha256:c"


def test_a_package_that_is_not_pinned_is_never_fetched() -> None:
    with pytest.raises(FailedError, match="not pinned"):
        pinned_requirement("tw", "two==2 --hash=sha256:b\n")
