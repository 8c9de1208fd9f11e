"""Which nodes a pool selects: `allNodes`, `nodeSelector` and `nodeSelectorTerms` of its spec.

Matching is that of core/v1: requirements as in a Pod's node affinity, without fields, Gt and Lt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self


class Operator(StrEnum):
    """How a requirement compares a label with its values."""

    IN = "In"
    NOT_IN = "NotIn"
    """True of a node without the label too, as in core/v1."""
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"


@dataclass(frozen=True, slots=True)
class Requirement:
    """One of a term's `matchExpressions`."""

    key: str
    operator: str
    values: frozenset[str] = frozenset()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read one requirement. Raises KeyError without a key or an operator."""
        values = frozenset(str(value) for value in document.get("values") or ())
        return cls(str(document["key"]), str(document["operator"]), values)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels meets it; False for an operator that is not known."""
        if self.operator == Operator.IN:
            return labels.get(self.key) in self.values
        if self.operator == Operator.NOT_IN:
            return labels.get(self.key) not in self.values
        if self.operator == Operator.EXISTS:
            return self.key in labels
        return self.operator == Operator.DOES_NOT_EXIST and self.key not in labels


Term = tuple[Requirement, ...]
"""Requirements of which all must hold. Without any, it matches no node, as in core/v1."""


@dataclass(frozen=True, slots=True)
class NodeSelection:
    """Which nodes a pool selects. Without anything given, every node."""

    labels: frozenset[tuple[str, str]] = frozenset()
    """Of `nodeSelector`: a node must have all of them."""
    terms: tuple[Term, ...] | None = None
    """Of `nodeSelectorTerms`: a node must match one of them; None where the field is not given."""
    all_nodes: bool = False
    """`allNodes: true`: whatever else is given."""

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Self:
        """Read the fields of a HostMemoryPool's spec, or of its `rollout.partition`.

        What the API server has checked can always be read. Raises KeyError, TypeError or
        AttributeError for what it would have refused.
        """
        terms = spec.get("nodeSelectorTerms")
        return cls(
            labels=frozenset((spec.get("nodeSelector") or {}).items()),
            terms=None if not terms else tuple(_term(term) for term in terms),
            all_nodes=spec.get("allNodes") is True,
        )

    @property
    def selects_all(self) -> bool:
        """Whether every node is selected: by an explicit word, or for want of any restriction."""
        return self.all_nodes or (not self.labels and self.terms is None)

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether a node with these labels is selected."""
        if self.selects_all:
            return True
        if not all(labels.get(key) == value for key, value in self.labels):
            return False
        return self.terms is None or any(_matches(term, labels) for term in self.terms)


def _term(document: Mapping[str, Any]) -> Term:
    expressions: Iterable[Mapping[str, Any]] = document.get("matchExpressions") or ()
    return tuple(Requirement.from_json(one) for one in expressions)


def _matches(term: Term, labels: Mapping[str, str]) -> bool:
    return bool(term) and all(requirement.matches(labels) for requirement in term)
