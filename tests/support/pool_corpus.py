"""Pools that are good or bad, and good ones spoilt at random: judged alike by every judge."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from hostprep.api.pool_resource import load_pools
from hostprep.errors import BadInputError

JsonObject = dict[str, Any]
_ROOT = Path(__file__).parents[1] / "corpus" / "pools"


@dataclass(frozen=True, slots=True)
class Case:
    """One file of the corpus; a bad one says in its first line which field is to be named."""

    name: str
    text: str
    field: str

    @property
    def document(self) -> JsonObject:
        """What the file holds, as the API server is sent it."""
        document: JsonObject = json.loads(json.dumps(yaml.safe_load(self.text)))
        return document


def _cases(folder: str) -> tuple[Case, ...]:
    paths = sorted((_ROOT / folder).glob("*.yaml"))
    return tuple(Case(path.stem, text, _field(text)) for path in paths for text in [_read(path)])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _field(text: str) -> str:
    first = text.partition("\n")[0]
    return first.removeprefix("# field: ") if first.startswith("# field: ") else ""


GOOD = _cases("good")
BAD = _cases("bad")


def names(message: str, field: str) -> bool:
    """Whether a message names the field (not merely one whose name begins alike)."""
    return re.search(rf"(?<!\w){re.escape(field)}(?!\w)", message) is not None


class _Plain(yaml.SafeDumper):
    """Writes every value out; aliases are refused by the loader."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def verdict_of_command_line(document: JsonObject) -> str:
    """The refusal, or nothing for a pool that is accepted."""
    # Not as JSON: to YAML 1.1 the number 1e-05 is a word.
    text = yaml.dump(document, Dumper=_Plain, allow_unicode=True)
    try:
        load_pools(text, source="pool.yaml")
    except BadInputError as error:
        return str(error)
    return ""


_PATHS = (
    *(("spec", name) for name in ("size", "percent", "backings", "regions", "reserve", "boot")),
    *(("spec", name) for name in ("priority", "nodeSelector", "deletionPolicy", "sizing", "x")),
    *(("spec", name) for name in ("access", "lease", "scrub", "attach", "readiness", "rollout")),
    *(("spec", name) for name in ("allNodes", "nodeSelectorTerms", "regionSize", "release")),
    ("spec", "deletionProtection"),
    ("spec", "release", "when"),
    ("spec", "release", "gracePeriodSeconds"),
    ("spec", "rollout", "paused"),
    ("spec", "rollout", "partition"),
    ("spec", "rollout", "partition", "nodes"),
    ("spec", "rollout", "partition", "nodeSelector"),
    ("apiVersion",),
    ("spec", "access", "gid"),
    ("spec", "access", "mode"),
    ("spec", "lease", "maxWaitSeconds"),
    ("spec", "scrub", "when"),
    ("spec", "attach", "mode"),
    ("spec", "accounting", "require"),
    ("spec", "rollout", "maxUnavailable"),
    *(("spec", "readiness", name) for name in ("required", "profile", "taintKey", "reclose")),
    *(("spec", "readiness", name) for name in ("deadlineSeconds", "onDeadline", "y")),
    *(("spec", "readiness", "reclose", name) for name in ("reboot", "repair", "resize", "join")),
    ("metadata", "name"),
    ("metadata", "labels"),
)

quantities = st.from_regex(
    r"\A[+-]?([0-9]{0,4}[.]?[0-9]{0,11})(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E|m|u|n|[eE][+-]?[0-9]{1,3})?\Z"
)
"""Quantities, and texts that are nearly some."""

_WORDS = st.sampled_from(
    [
        *[
            "8Gi",
            "0",
            "50%",
            "100%",
            "0660",
            "660",
            "0777",
            "PerGPU",
            "Single",
            "16",
            "Base",
            "THP",
        ],
        *["Taint", "LabelOnly", "None", "Karpenter", "OnClaim", "hostPath", "systemd", "Retain"],
        *[
            "example.com/hold",
            "node.kubernetes.io/x",
            "a.b/",
            "/a",
            "KV",
            "kv-1",
            "OpenWithout",
            "",
        ],
    ]
)
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 1100),
    st.sampled_from([-(1 << 31) - 1, 1 << 31, 1 << 32, 1 << 50, (1 << 50) + 1, 1 << 63, 10**30]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, 0.5, 62.5, 99.999, 1e9, 1e300]),
    _WORDS,
    quantities,
    st.text(st.characters(codec="ascii"), max_size=8),
    st.text(max_size=4),
)
_BACKINGS = st.lists(
    st.sampled_from(["HugeTLB1Gi", "HugeTLB2Mi", "THP", "Base", "base", None, 2]), max_size=5
)
_VALUES = st.one_of(
    _SCALARS,
    _SCALARS,
    _BACKINGS,
    st.lists(_SCALARS, max_size=2),
    st.dictionaries(_WORDS | st.text(max_size=5), _SCALARS, max_size=2),
    st.dictionaries(_WORDS, _WORDS, max_size=2),
)


_KEYS = st.from_regex(r"\A([a-z0-9.-]{0,6}/)?[A-Za-z0-9_.-]{0,4}\Z")
_LABELS = st.dictionaries(_KEYS, st.from_regex(r"\A[A-Za-z0-9_.-]{0,4}\Z"), max_size=2)
_NUMBERS = st.integers(-2, 1100) | st.sampled_from([86400, 86401, 604800, 604801, (1 << 32) - 2])
_TERMS = st.fixed_dictionaries(
    {},
    optional={
        "matchExpressions": st.lists(
            st.fixed_dictionaries(
                {"key": _KEYS, "operator": st.sampled_from(["In", "NotIn", "Exists", "Gt"])},
                optional={
                    "values": st.lists(st.sampled_from(["a", "", "8", "a b", 8]), max_size=2)
                },
            ),
            max_size=2,
        )
    },
)
_LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "size": quantities,
    "reserve": quantities,
    "percent": st.floats(0, 101) | _NUMBERS,
    "allNodes": st.booleans(),
    "nodeSelectorTerms": st.lists(_TERMS, max_size=2),
    "regionSize": quantities,
    "gracePeriodSeconds": _NUMBERS,
    "paused": st.booleans(),
    "nodes": _NUMBERS | st.from_regex(r"\A[0-9]{1,3}%\Z"),
    "deletionProtection": st.sampled_from(["WhileLeased", "Always", "None"]),
    "apiVersion": st.sampled_from(["hostprep.dev/v1alpha1", "hostprep.dev/v1beta1"]),
    "backings": _BACKINGS,
    "regions": _NUMBERS | st.sampled_from(["PerNUMANode", "PerGPU", "Single"]),
    "priority": _NUMBERS,
    "gid": _NUMBERS,
    "mode": st.from_regex(r"\A0?[0-7]{2,3}\Z") | st.sampled_from(["hostPath", "DevicePlugin"]),
    "maxWaitSeconds": _NUMBERS,
    "deadlineSeconds": _NUMBERS,
    "maxUnavailable": _NUMBERS | st.from_regex(r"\A[0-9]{1,3}%\Z"),
    "taintKey": _KEYS,
    "nodeSelector": _LABELS,
    "labels": _LABELS,
    "name": st.from_regex(r"\A[a-z0-9-]{1,64}\Z"),
    "required": st.booleans(),
    "require": st.booleans(),
    "profile": st.sampled_from(["ClusterAutoscaler", "NodeReadinessController", "None"]),
    "when": st.sampled_from(["OnRelease", "OnClaim", "AfterGracePeriod", "Immediately"]),
    "boot": st.sampled_from(["none", "systemd", "None", "Systemd"]),
    "deletionPolicy": st.sampled_from(["Release", "Retain"]),
    "onDeadline": st.sampled_from(["StayClosed", "OpenWithout"]),
    "reboot": st.sampled_from(["Taint", "LabelOnly"]),
    "repair": st.sampled_from(["Taint", "LabelOnly"]),
    "resize": st.sampled_from(["Taint", "LabelOnly"]),
}
"""Values of which many are right: else nearly every spoilt pool would be a bad one."""


@st.composite
def mutated_pools(draw: st.DrawFn) -> JsonObject:
    """A good pool with one to three fields removed, or set to anything that JSON can say."""
    document = copy.deepcopy(draw(st.sampled_from(GOOD)).document)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(_PATHS))
        place = document
        for step in parents:
            inner = place.get(step)
            place[step] = place = inner if isinstance(inner, dict) else {}
        what = draw(st.sampled_from(["remove", "likely", "likely", "likely", "any"]))
        if what == "remove" and last != "apiVersion":
            place.pop(last, None)
        else:
            likely = _LIKELY.get(last, st.just({}))
            place[last] = draw(likely if what == "likely" or last == "apiVersion" else _VALUES)
    return document


def selects_nothing(document: JsonObject) -> bool:
    """Whether the pool's selection is missing, which the API server refuses and a node does not."""
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return False
    return not (
        spec.get("allNodes") is True or spec.get("nodeSelector") or spec.get("nodeSelectorTerms")
    )
