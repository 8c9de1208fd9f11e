"""Prometheus rules as values, and how they are written down."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import yaml

__all__ = ["AGENT_JOB", "OPERATOR_JOB", "RUNBOOK_URL", "Alert", "Group", "Record", "rules_yaml"]

AGENT_JOB = "hostprep-agent"
"""Value of the label `job` that the scrape configuration gives the agents."""
OPERATOR_JOB = "hostprep-operator"

RUNBOOK_URL = "https://hostprep.dev/docs/runbooks/alerts.md"
"""Where people find docs/runbooks/alerts.md; the chart replaces it by a value."""

_HEADER = """\
# Written by `python -m observability --write`: change observability/, not this file.
# Plain Prometheus rule groups: `rule_files` takes them as they are; the chart makes a
# PrometheusRule of them. They expect the label `job` to be {agent} or
# {operator}, and a label `node` on the targets of the agents.
"""

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A recording rule; the name says level:metric:operation."""

    name: str
    expr: str

    def document(self) -> dict[str, Any]:
        """Return it as Prometheus reads it."""
        return {"record": self.name, "expr": self.expr}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert: what is wrong, with numbers, and what a person does next."""

    name: str
    expr: str
    hold: str
    """Prometheus's `for`."""
    severity: Severity
    summary: str
    description: str

    @property
    def runbook_url(self) -> str:
        """Its section of the runbook; the anchor as Markdown renderers make it of the heading."""
        return f"{RUNBOOK_URL}#{self.name.lower()}"

    def document(self) -> dict[str, Any]:
        """Return it as Prometheus reads it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": self.runbook_url,
            },
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that are evaluated one after another."""

    name: str
    rules: tuple[Record | Alert, ...]


class _Dumper(yaml.SafeDumper):
    """Writes expressions of several lines as people do."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def rules_yaml(groups: Iterable[Group]) -> str:
    """Return the rule file's text."""
    document = {
        "groups": [
            {"name": group.name, "rules": [rule.document() for rule in group.rules]}
            for group in groups
        ]
    }
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True)
    return _HEADER.format(agent=AGENT_JOB, operator=OPERATOR_JOB) + text
