"""All rule groups, and the rule file made of them."""

from __future__ import annotations

from collections.abc import Iterator

from observability.alerts_agents import AGENTS, MEMORY
from observability.alerts_operator import OPERATOR
from observability.alerts_pools import NODES, POOLS
from observability.model import Alert, Record, rules_yaml

__all__ = ["GROUPS", "alerts", "records", "rules_text"]

GROUPS = (POOLS, NODES, MEMORY, AGENTS, OPERATOR)


def alerts() -> Iterator[Alert]:
    """Yield every alert."""
    for group in GROUPS:
        yield from (rule for rule in group.rules if isinstance(rule, Alert))


def records() -> Iterator[Record]:
    """Yield every recording rule."""
    for group in GROUPS:
        yield from (rule for rule in group.rules if isinstance(rule, Record))


def rules_text() -> str:
    """Return the text of charts/hostprep/files/rules/hostprep.yaml."""
    return rules_yaml(GROUPS)
