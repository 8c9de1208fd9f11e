"""`hostprep engines`: which engines can be led to prepared memory, and what the tests saw."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hostprep.engines.catalogue import WAYS, Tried, Way, tried, way_of
from hostprep.engines.trtllm.connectors import (
    CONNECTORS,
    connector_yaml,
    lmcache,
    mooncake,
    mooncake_client,
)
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["run_engines"]

_COLUMNS = ("NAME", "ENGINE", "VERSIONS", "HOW", "IN BACKGROUND", "KIND", "LAST TEST")


def run_engines(options: argparse.Namespace) -> int:
    """Print the table, one engine's entry, or TensorRT-LLM's configuration. Returns 0.

    Raises BadInputError for an engine that is not there, and for options of another one.
    """
    if options.connector or options.server or options.model_key:
        print(_configuration(options), end="")
        return 0
    ways = (way_of(options.name),) if options.name else WAYS
    if options.output == "json":
        import json

        print(json.dumps([_document(way) for way in ways], indent=2))
    elif options.name:
        print(_entry(ways[0]))
    else:
        for row in _aligned([_COLUMNS, *(_row(way) for way in WAYS)]):
            print(row)
        print(_LEGEND)
    return 0


_LEGEND = """
IN BACKGROUND: serves while its memory is still being registered with CUDA.
KIND: takes turns in registering with the node's other processes.
`hostprep engines NAME` shows how to start one."""


def _document(way: Way) -> dict[str, Any]:
    return {
        "name": way.name,
        "engine": way.engine,
        "versions": list(way.versions),
        "how": way.how,
        "background": way.background,
        "kind": way.kind,
        "docs": way.docs,
        "example": way.example,
        "tested": [
            {"version": row.version, "date": row.date, "result": row.result} for row in _rows(way)
        ],
    }


def _rows(way: Way) -> list[Tried]:
    return [row for row in tried() if row.way == way.name]


def _last_tests(way: Way) -> str:
    """Return what came of each release that was tested, those with the same result together."""
    versions: dict[tuple[str, str], list[str]] = {}
    for row in _rows(way):
        versions.setdefault((row.result, row.date), []).append(row.version)
    return "; ".join(f"{' '.join(key)} ({', '.join(found)})" for key, found in versions.items())


def _row(way: Way) -> tuple[str, ...]:
    return (
        way.name,
        way.engine,
        ", ".join(way.versions) or "-",
        way.how,
        "yes" if way.background else "no",
        "yes" if way.kind else "no",
        _last_tests(way) or "-",
    )


def _entry(way: Way) -> str:
    """Return what one needs to know about a way, as text."""
    names = ("engine", "versions", "how", "in background", "kind", "last test")
    lines = [f"{name}: {text}" for name, text in zip(names, _row(way)[1:])]
    return "\n".join([*lines, f"more: {way.docs}", "", f"  {way.example}"])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
    ]


def _configuration(options: argparse.Namespace) -> str:
    """Return the file for `trtllm-serve --config`, or Mooncake's for its client."""
    if options.name != "trtllm" or options.connector is None:
        raise BadInputError(
            "--server and --model-key go with `hostprep engines trtllm --connector NAME`",
            reason="BadInput",
            remedy=f"NAME is one of {', '.join(CONNECTORS)}",
        )
    if options.connector == "lmcache":
        server = options.server or "tcp://127.0.0.1:5555"
        return connector_yaml(
            lmcache(server),
            "trtllm-serve MODEL --config THIS_FILE, with PYTHONHASHSEED=0 in its environment",
            "the memory is the LMCache server's: hostprep exec --engine lmcache",
        )
    if options.server or options.model_key:
        client = mooncake_client(options.server or "127.0.0.1:50051", options.model_key or "")
        return connector_yaml(client)
    return connector_yaml(
        mooncake(),
        "trtllm-serve MODEL --config THIS_FILE, with MOONCAKE_CONFIG_PATH leading to the client's:",
        "hostprep engines trtllm --connector mooncake --server HOST:PORT --model-key KEY",
    )
