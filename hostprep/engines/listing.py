"""`hostprep engines`: which engines can use prepared memory, and what the tests recorded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from hostprep.engines.catalogue import INTEGRATIONS, Integration, integration_of, recorded_tests
from hostprep.engines.trtllm import CONNECTORS, connector_config
from hostprep.errors import BadInputError

_COLUMNS = ("NAME", "ENGINE", "VERSIONS", "HOW", "IN BACKGROUND", "KIND", "LAST TEST")


def run_engines(options: argparse.Namespace) -> int:
    """Print the table, one engine's entry, or TensorRT-LLM's configuration. Returns 0.

    Raises BadInputError for an engine that is not there, and for options of another one.
    """
    if options.connector or options.server or options.model_key:
        if options.name != "trtllm" or options.connector is None:
            raise BadInputError(
                "--server and --model-key go with `hostprep engines trtllm --connector NAME`",
                reason="BadInput",
                remedy=f"NAME is one of {', '.join(CONNECTORS)}",
            )
        print(connector_config(options.connector, options.server, options.model_key), end="")
        return 0
    integrations = (integration_of(options.name),) if options.name else INTEGRATIONS
    if options.output == "json":
        print(json.dumps([_document(each) for each in integrations], indent=2))
    elif options.name:
        print(_entry(integrations[0]))
    else:
        rows = [_COLUMNS, *map(_row, integrations)]
        narrow = get_terminal_size(_NO_TERMINAL).columns < max(map(len, _aligned(rows)))
        for line in _narrow(rows) if narrow else _aligned(rows):
            print(line)
        print(_LEGEND)
    return 0


_NO_TERMINAL = (1000, 24)
"""In a pipe lines are as long as they need, unless COLUMNS says otherwise."""

_LEGEND = """
IN BACKGROUND: serves while its memory is still being registered with CUDA.
KIND: takes turns in registering with the node's other processes.
`hostprep engines NAME` shows how to start one, and its last test."""


def _document(integration: Integration) -> dict[str, Any]:
    return {
        "name": integration.name,
        "engine": integration.engine,
        "versions": list(integration.versions),
        "how": integration.how,
        "background": integration.background,
        "kind": integration.takes_turns,
        "docs": integration.docs,
        "example": integration.example,
        "tested": [
            {"version": row.version, "date": row.date, "result": row.result}
            for row in recorded_tests(integration)
        ],
    }


def _last_tests(integration: Integration) -> str:
    """Return what came of each release that was tested, those with the same result together."""
    versions: dict[tuple[str, str], list[str]] = {}
    for row in recorded_tests(integration):
        versions.setdefault((row.result, row.date), []).append(row.version)
    return "; ".join(f"{' '.join(key)} ({', '.join(found)})" for key, found in versions.items())


def _row(integration: Integration) -> tuple[str, ...]:
    return (
        integration.name,
        integration.engine,
        ", ".join(integration.versions) or "-",
        integration.how,
        "yes" if integration.background else "no",
        "yes" if integration.takes_turns else "no",
        _last_tests(integration) or "-",
    )


def _entry(integration: Integration) -> str:
    """Return what one needs to know about an integration, as text."""
    cells = list(zip(_COLUMNS, _row(integration)))[1:]
    lines = [f"{column.lower()}: {text}" for column, text in cells]
    return "\n".join([*lines, f"more: {integration.docs}", "", f"  {integration.example}"])


_NARROW = (17, 12, 15, 13, 10, 4)
"""Widths on a terminal of 80 columns, on which the last test finds no place."""


def _narrow(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = []
    for row in rows:
        cells = [wrap(cell, width) for cell, width in zip(row, _NARROW)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(width) for part, width in zip(parts, _NARROW))
            lines.append(" ".join(padded).rstrip())
    return lines


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]
