"""The custom resource and the options: what is accepted, and the one line for what is not."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hostprep.api.pool_resource import MAX_TEXT_BYTES, load_pools, spec_from_options
from hostprep.api.pool_spec import DEFAULT_BACKINGS, PoolSpec, RegionLayout
from hostprep.backing import GIB, Backing
from hostprep.errors import BadInputError

pytestmark = pytest.mark.unit

HEAD = "apiVersion: hostprep.dev/v1alpha1\nkind: HostMemoryPool\nmetadata: {name: kv}\nspec:\n"

FULL = """
apiVersion: hostprep.dev/v1alpha1
kind: HostMemoryPool
metadata:
  name: kv
  uid: 0a1b
  labels: {team: serving}
  creationTimestamp: 2026-01-01T00:00:00Z
spec:
  nodeSelector: {gpu: "true"}
  priority: 7
  percent: 62
  backings: [HugeTLB1Gi, Base]
  regions: 16
  reserve: 32Gi
  access: {gid: 4000, mode: "0640"}
  lease: {maxWaitSeconds: 30}
  scrub: {when: OnClaim}
  retention: {maxAgeSeconds: 86400}
  attach: {mode: devicePlugin}
  readiness:
    required: true
    profile: Karpenter
    taintKey: example.com/host-memory
    reclose: {reboot: Taint, repair: Taint, resize: LabelOnly}
    deadlineSeconds: 300
    onDeadline: OpenWithout
  accounting: {require: true}
  boot: systemd
  rollout: {maxUnavailable: 10%}
  deletionPolicy: Retain
status: {observedGeneration: 1}
"""


def load(spec: str) -> PoolSpec:
    return load_pools(f"{HEAD}  {spec}\n", source="pool.yaml")[0]


def refusal(spec: str) -> str:
    return refusal_of(f"{HEAD}  {spec}\n")


def refusal_of(text: str) -> str:
    with pytest.raises(BadInputError) as caught:
        load_pools(text, source="pool.yaml")
    message = str(caught.value)
    assert message.startswith("pool.yaml: ")
    assert "\n" not in message
    assert caught.value.remedy
    return message


def sizes_of(spec: PoolSpec) -> list[object]:
    """Return what a size can be given by, of which three are None."""
    return [spec.size_bytes, spec.percent, spec.region_size_bytes, spec.sizing]


def outcome(text: str) -> str:
    """Return the refusal, or nothing; any other exception fails the test."""
    try:
        specs = load_pools(text, source="pool.yaml")
    except BadInputError as error:
        return str(error)
    for spec in specs:
        assert sizes_of(spec).count(None) == 3
    return ""


def test_every_field_is_accepted_and_the_node_half_is_kept() -> None:
    assert load_pools(FULL, source="pool.yaml") == (
        PoolSpec(
            name="kv",
            uid="0a1b",
            percent=62,
            priority=7,
            backings=(Backing.HUGETLB_1GI, Backing.BASE),
            layout=RegionLayout.COUNT,
            region_count=16,
            reserve_bytes=32 * GIB,
            gid=4000,
            mode=0o640,
            max_kept_s=86400,
        ),
    )


def test_both_versions_are_read_and_each_has_its_spellings() -> None:
    beta = FULL.replace("v1alpha1", "v1beta1")
    assert "spec.attach.mode: 'devicePlugin'" in refusal_of(beta)
    beta = beta.replace("devicePlugin", "DevicePlugin")
    assert "spec.boot: 'systemd'" in refusal_of(beta)
    beta = beta.replace("systemd", "Systemd")
    assert load_pools(beta, source="beta") == load_pools(FULL, source="alpha")
    both = f"{FULL}---\n{beta}".replace("name: kv", "name: kv-2", 1)
    assert [spec.name for spec in load_pools(both, source="both")] == ["kv-2", "kv"]


def test_a_region_s_size_is_rounded_up_to_pages_of_every_backing() -> None:
    assert load("regionSize: 3Gi").region_bytes == 3 * GIB
    assert load("regionSize: 1").region_bytes == 2 << 20
    spec = load("regionSize: 1500Mi\n  backings: [HugeTLB1Gi, Base]\n  regions: PerGPU")
    assert spec.region_bytes == 2 * GIB
    assert spec.size_bytes is None


def test_a_file_needs_no_selection_of_nodes() -> None:
    assert "nodeSelector" not in HEAD
    assert load("size: 8Gi").size_bytes == 8 * GIB


def test_a_size_alone_gets_the_defaults() -> None:
    spec = load("size: 8Gi")
    assert spec.size_bytes == 8 * GIB
    assert spec.backings == DEFAULT_BACKINGS
    assert spec.layout is RegionLayout.PER_NUMA_NODE
    assert spec.mode == 0o660


@pytest.mark.parametrize("layout", ["PerNUMANode", "PerGPU", "Single"])
def test_layouts_go_by_name(layout: str) -> None:
    spec = load(f"size: 8Gi\n  regions: {layout}")
    assert spec.layout.value == layout
    assert spec.region_count is None


def test_several_documents_are_several_pools() -> None:
    second = HEAD.replace("name: kv", "name: spare")
    text = f"---\n{HEAD}  size: 1Gi\n---\n{second}  size: 2Gi\n---\n"
    assert [spec.name for spec in load_pools(text, source="pool.yaml")] == ["kv", "spare"]


def test_two_pools_of_one_name_are_refused() -> None:
    assert "document 2: metadata.name" in refusal_of(f"{HEAD}  size: 1Gi\n---\n{HEAD}  size: 2Gi")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("size: 0", ["spec.size", "more than zero"]),
        ("size: -1Gi", ["spec.size", "more than zero"]),
        ("size: lots", ["spec.size", "'lots'", "8Gi"]),
        ("size: true", ["spec.size", "not a quantity"]),
        ("size: [1]", ["spec.size", "not a quantity"]),
        ("size: 9Ei", ["spec.size", "more than a file can hold"]),
        ("priority: 1", ["spec", "no size"]),
        ("size: 8Gi\n  percent: 5", ["spec", "exclude each other"]),
        ("sizing: {model: x}", ["spec.sizing.tokensPerBlock", "is missing"]),
        ("percent: 0", ["spec.percent", "greater than or equal to 1"]),
        ("percent: 101", ["spec.percent", "less than or equal to 100"]),
        ("percent: .nan", ["spec.percent", "out of range"]),
        ("percent: 62.5", ["spec.percent", "62.5 is not a whole number", "write 62"]),
        ("percent: 5\n  regionSize: 8Gi", ["spec", "percent and regionSize exclude each other"]),
        ("regionSize: 8Gb", ["spec.regionSize", "8Gi"]),
        ("size: 8Gi\n  sise: 9Gi", ["spec.sise", "no field", "did you mean size?"]),
        ("size: 8Gi\n  size: 9Gi", ["twice"]),
        ("size: 8Gi\n  backings: [HugeTLB4Mi]", ["spec.backings[0]", "HugeTLB1Gi, HugeTLB2Mi"]),
        ("size: 8Gi\n  backings: Base", ["spec.backings", "not a list"]),
        ("size: 8Gi\n  backings: []", ["backings is empty"]),
        ("size: 8Gi\n  backings: [Base, Base]", ["names 'Base' twice"]),
        ("size: 8Gi\n  regions: 0", ["spec.regions", "1 to 1024"]),
        ("size: 8Gi\n  regions: 1025", ["spec.regions", "1 to 1024"]),
        ("size: 8Gi\n  regions: true", ["spec.regions", "PerNUMANode"]),
        ("size: 8Gi\n  regions: PerNode", ["spec.regions", "PerNUMANode"]),
        ("size: 8Gi\n  access: {mode: 0660}", ["spec.access.mode", 'mode: "0660"']),
        ("size: 8Gi\n  access: {mode: '0888'}", ["spec.access.mode", "octal"]),
        ("size: 8Gi\n  access: {mode: '0066'}", ["spec.access.mode", "owner"]),
        ("size: 8Gi\n  access: {mode: '4755'}", ["spec.access.mode", "octal"]),
        ("size: 8Gi\n  access: {mode: '0777'}", ["spec.access.mode", "everybody", '"0660"']),
        ("size: 8Gi\n  access: {mode: '662'}", ["spec.access.mode", "everybody"]),
        ("size: 8Gi\n  access: {gid: staff}", ["spec.access.gid", "whole number"]),
        ("size: 8Gi\n  access: {gid: 4294967295}", ["spec.access.gid", "out of range"]),
        ("size: 8Gi\n  access: 5", ["spec.access", "not a mapping"]),
        ("size: 8Gi\n  attach: {mode: csi}", ["spec.attach.mode", "'HostPath' or 'DevicePlugin'"]),
        ("size: 8Gi\n  rollout: {maxUnavailable: 0}", ["spec.rollout.maxUnavailable"]),
        ("size: 8Gi\n  readiness: {reclose: {rebot: Taint}}", ["did you mean reboot?"]),
        ("size: 8Gi\n  nodeSelector: {gpu: true}", ["spec.nodeSelector.gpu", "quotes"]),
        (
            "size: 8Gi\n  allNodes: true\n  nodeSelector: {gpu: ''}",
            ["spec.allNodes", "excludes nodeSelector and nodeSelectorTerms"],
        ),
        ("size: 8Gi\n  allnodes: true", ["did you mean allNodes?"]),
        (
            "size: 8Gi\n  readiness: {taintKey: nvidia.com/gpu}",
            ["spec.readiness.taintKey", "neither hostprep nor host-memory", "example.com/host-mem"],
        ),
        ("size: 8Gi\n  rollout: {partition: {}}", ["spec.rollout.partition", "neither"]),
    ],
)
def test_a_bad_field_is_named_with_its_remedy(spec: str, words: list[str]) -> None:
    message = refusal(spec)
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["a/b", "..", "KV", "", "-a", "a" * 64])
def test_a_name_that_is_no_dns_label_is_refused(name: str) -> None:
    text = HEAD.replace("name: kv", f"name: '{name}'") + "  size: 1Gi\n"
    assert "metadata.name" in refusal_of(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no HostMemoryPool"),
        ("[]", "no mapping"),
        ("kind: Pod\napiVersion: v1", "apiVersion: is 'v1'"),
        ("apiVersion: hostprep.dev/v1alpha1\nkind: Pod", "kind: is 'Pod'"),
        ("a: b: c", "line 1"),
        ("\0", "not YAML"),
        ("!!python/object/apply:os.system [id]", "not YAML"),
        ("a: &x [1]\nb: *x", "aliases"),
        ("a: " + "[" * 40 + "]" * 40, "nested deeper"),
        ("a: " + "9" * 5000, "5000 characters"),
        ("? {a: b}\n: c", "not YAML"),
        ("a: 2001-99-99", "not YAML"),
    ],
)
def test_text_that_is_no_pool_is_refused_in_one_line(text: str, words: str) -> None:
    assert words in refusal_of(text)


def test_too_much_text_is_not_parsed() -> None:
    assert "1 MiB" in refusal_of("#" * (MAX_TEXT_BYTES + 1))
    assert "1 MiB" in refusal_of("é" * (MAX_TEXT_BYTES // 2 + 1))


def test_a_bomb_of_aliases_is_refused_before_anything_is_built() -> None:
    levels = ["a: &a [x, x, x]"] + [
        f"{c}: &{c} [*{p}, *{p}, *{p}]" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    assert "aliases" in refusal_of("\n".join(levels))


@given(st.text(max_size=200))
def test_any_text_is_either_pools_or_bad_input(text: str) -> None:
    assert "\n" not in outcome(text)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["size", "percent", "backings", "regions", "reserve", "access", "priority", "readiness"]
)


@given(st.dictionaries(FIELDS, VALUES, min_size=1))
def test_any_values_are_either_a_pool_or_one_line(values: dict[str, object]) -> None:
    document = {
        "apiVersion": "hostprep.dev/v1alpha1",
        "kind": "HostMemoryPool",
        "metadata": {"name": "kv"},
        "spec": values,
    }
    assert "\n" not in outcome(yaml.safe_dump(document))


def test_options_make_the_same_spec_as_a_file() -> None:
    spec = spec_from_options(
        name="kv",
        size="62%",
        backings="HugeTLB1Gi, Base",
        regions="16",
        reserve="32Gi",
        gid=4000,
        mode="0640",
        priority=7,
    )
    without_option = FULL.replace("  retention: {maxAgeSeconds: 86400}\n", "")
    (of_file,) = load_pools(without_option.replace("uid: 0a1b", ""), source="pool.yaml")
    assert spec == of_file


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "a/b", "size": "8Gi"}, "--name"),
        ({"name": "kv", "size": "0"}, "--size"),
        ({"name": "kv", "size": "x%"}, "--size"),
        ({"name": "kv", "size": "101%"}, "--size"),
        ({"name": "kv", "size": "0%"}, "--size"),
        ({"name": "kv", "size": "62.5%"}, "--size"),
        ({"name": "kv", "size": "nan%"}, "--size"),
        ({"name": "kv"}, "--size"),
        ({"name": "kv", "size": "8Gi", "backings": "Huge"}, "--backing"),
        ({"name": "kv", "size": "8Gi", "regions": "0"}, "--regions"),
        ({"name": "kv", "size": "8Gi", "regions": "PerRack"}, "--regions"),
        ({"name": "kv", "size": "8Gi", "reserve": "much"}, "--reserve"),
        ({"name": "kv", "size": "8Gi", "gid": -1}, "--gid"),
        ({"name": "kv", "size": "8Gi", "mode": "rw"}, "--mode"),
        ({"name": "kv", "size": "8Gi", "mode": "0666"}, "--mode"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(BadInputError) as caught:
        spec_from_options(**options)  # type: ignore[arg-type]
    assert f"command line: {words}:" in str(caught.value)
    assert "\n" not in str(caught.value)
