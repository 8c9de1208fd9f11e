"""Which nodes a pool selects, beside a plain transcription of what core/v1 documents."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostprep.api.selector import NodeSelection

pytestmark = pytest.mark.unit

JsonObject = dict[str, Any]
GPU = "nvidia.com/gpu.product"


def term(key: str, operator: str, *values: str) -> JsonObject:
    expression: JsonObject = {"key": key, "operator": operator}
    return {"matchExpressions": [expression | ({"values": list(values)} if values else {})]}


@pytest.mark.parametrize(
    ("spec", "labels", "selected"),
    [
        ({}, {}, True),
        ({"nodeSelector": {}}, {"a": "1"}, True),
        ({"nodeSelector": None, "nodeSelectorTerms": None}, {}, True),
        ({"nodeSelectorTerms": []}, {}, True),
        ({"allNodes": True}, {}, True),
        ({"allNodes": False}, {"a": "1"}, True),
        ({"nodeSelector": {"a": "1"}}, {"a": "1", "b": "2"}, True),
        ({"nodeSelector": {"a": "1"}}, {"a": "2"}, False),
        ({"nodeSelector": {"a": "1"}}, {}, False),
        ({"nodeSelector": {"a": ""}}, {"a": ""}, True),
        ({"nodeSelector": {"a": ""}}, {}, False),
        ({"nodeSelectorTerms": [term(GPU, "In", "H100", "H200")]}, {GPU: "H200"}, True),
        ({"nodeSelectorTerms": [term(GPU, "In", "H100", "H200")]}, {GPU: "L4"}, False),
        ({"nodeSelectorTerms": [term(GPU, "In", "H100")]}, {}, False),
        ({"nodeSelectorTerms": [term(GPU, "NotIn", "L4")]}, {GPU: "L4"}, False),
        ({"nodeSelectorTerms": [term(GPU, "NotIn", "L4")]}, {GPU: "H100"}, True),
        # As in core/v1: a node without the label has none of the values.
        ({"nodeSelectorTerms": [term(GPU, "NotIn", "L4")]}, {}, True),
        ({"nodeSelectorTerms": [term(GPU, "Exists")]}, {GPU: ""}, True),
        ({"nodeSelectorTerms": [term(GPU, "Exists")]}, {}, False),
        ({"nodeSelectorTerms": [term(GPU, "DoesNotExist")]}, {}, True),
        ({"nodeSelectorTerms": [term(GPU, "DoesNotExist")]}, {GPU: "H100"}, False),
        # As in core/v1: a term without expressions matches no node.
        ({"nodeSelectorTerms": [{}]}, {GPU: "H100"}, False),
        ({"nodeSelectorTerms": [{"matchExpressions": []}, term("a", "Exists")]}, {"a": ""}, True),
        # An operator of a newer version selects nothing that was not selected before.
        ({"nodeSelectorTerms": [term("a", "Gt", "1")]}, {"a": "2"}, False),
        (
            {"nodeSelector": {"a": "1"}, "nodeSelectorTerms": [term("b", "Exists")]},
            {"b": ""},
            False,
        ),
        (
            {"nodeSelector": {"a": "1"}, "nodeSelectorTerms": [term("b", "Exists")]},
            {"a": "1", "b": ""},
            True,
        ),
        # The partition of a roll-out by number says nothing of labels.
        ({"nodes": 3}, {}, True),
    ],
)
def test_a_node_is_selected_as_core_v1_would(
    spec: JsonObject, labels: dict[str, str], selected: bool
) -> None:
    assert NodeSelection.from_spec(spec).matches(labels) is selected


@pytest.mark.parametrize(
    ("spec", "all_of_them"),
    [
        ({}, True),
        ({"nodeSelector": {}}, True),
        ({"allNodes": True}, True),
        ({"allNodes": False, "nodeSelector": {"a": "1"}}, False),
        ({"nodeSelectorTerms": [{}]}, False),
        ({"nodeSelectorTerms": [term("a", "DoesNotExist")]}, False),
    ],
)
def test_it_is_known_whether_every_node_is_selected(spec: JsonObject, all_of_them: bool) -> None:
    assert NodeSelection.from_spec(spec).selects_all is all_of_them


keys = st.sampled_from(["a", "b", "c", "example.com/a"])
values = st.sampled_from(["", "1", "2", "true"])
labels = st.dictionaries(keys, values)
expressions = st.builds(
    lambda key, operator, some: (
        {"key": key, "operator": operator}
        | ({"values": some} if operator in {"In", "NotIn"} else {})
    ),
    keys,
    st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist"]),
    st.lists(values, min_size=1, max_size=3),
)
terms = st.fixed_dictionaries({"matchExpressions": st.lists(expressions, max_size=3)})
specs = st.fixed_dictionaries(
    {},
    optional={
        "nodeSelector": st.dictionaries(keys, values, max_size=2),
        "nodeSelectorTerms": st.lists(terms, min_size=1, max_size=3),
    },
)


def documented(spec: JsonObject, of_node: dict[str, str]) -> bool:
    """NodeSelector, NodeSelectorTerm and labels.Requirement.Matches, word by word.

    https://github.com/kubernetes/kubernetes/blob/v1.36.0/staging/src/k8s.io/component-helpers/scheduling/corev1/nodeaffinity/nodeaffinity.go
    https://github.com/kubernetes/kubernetes/blob/v1.36.0/staging/src/k8s.io/apimachinery/pkg/labels/selector.go
    """
    for key, value in spec.get("nodeSelector", {}).items():
        if key not in of_node or of_node[key] != value:
            return False
    if "nodeSelectorTerms" not in spec:
        return True
    for one in spec["nodeSelectorTerms"]:
        if not one["matchExpressions"]:
            continue  # "A null or empty node selector term matches no objects."
        matched = True
        for expression in one["matchExpressions"]:
            key = expression["key"]
            match expression["operator"]:
                case "In":
                    matched &= key in of_node and of_node[key] in expression["values"]
                case "NotIn":
                    matched &= key not in of_node or of_node[key] not in expression["values"]
                case "Exists":
                    matched &= key in of_node
                case "DoesNotExist":
                    matched &= key not in of_node
        if matched:
            return True
    return False


@given(spec=specs, of_node=labels)
def test_any_selection_matches_what_is_documented(
    spec: JsonObject, of_node: dict[str, str]
) -> None:
    assert NodeSelection.from_spec(spec).matches(of_node) is documented(spec, of_node)


@given(spec=specs)
def test_equal_selections_are_equal_and_can_be_keys(spec: JsonObject) -> None:
    turned = dict(reversed(spec.items()))
    assert NodeSelection.from_spec(spec) == NodeSelection.from_spec(turned)
    assert len({NodeSelection.from_spec(spec), NodeSelection.from_spec(turned)}) == 1


@given(spec=specs, of_node=labels)
def test_a_map_of_labels_says_the_same_as_a_term(spec: JsonObject, of_node: dict[str, str]) -> None:
    pairs = spec.get("nodeSelector", {"a": "1"}) or {"a": "1"}
    as_term = [
        {
            "matchExpressions": [
                {"key": key, "operator": "In", "values": [value]} for key, value in pairs.items()
            ]
        }
    ]
    by_map = NodeSelection.from_spec({"nodeSelector": pairs})
    assert by_map.matches(of_node) is NodeSelection.from_spec(
        {"nodeSelectorTerms": as_term}
    ).matches(of_node)
