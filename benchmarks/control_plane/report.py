"""What the sizes showed: a table, straight lines through it, JSON, and a page."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import linear_regression, median

from benchmarks.control_plane.scale import Point, percentile
from hostprep.console import print_table

_DOCS = Path(__file__).parents[2] / "docs"
_MIB = 1 << 20


def _peak(point: Point) -> str:
    return f"{point.peak_rss_bytes / _MIB:.0f}"


def _storm(delays_s: Sequence[float]) -> str:
    if not delays_s:
        return ""
    p50, p99 = median(delays_s), percentile(delays_s, 0.99)
    return f"{p50 * 1000:.0f} / {p99 * 1000:.0f} ms"


def _ratio(point: Point) -> str:
    ratio = point.storm_ratio
    return "" if ratio is None else f"{ratio:.2f}"


def _per_report(point: Point) -> str:
    cost_ms = point.cpu_ms_per_report
    return "" if cost_ms is None else f"{cost_ms:.2f} ms"


Row = tuple[str, Callable[[Point], str]]
_ROWS: tuple[Row, ...] = (
    ("all specs written", lambda p: f"{p.specs_s:.1f} s"),
    ("then all nodes open", lambda p: f"{p.marked_s:.1f} s"),
    ("operator CPU until then", lambda p: f"{p.operator_cpu_s:.1f} s"),
    ("the same a node", lambda p: f"{1000 * p.operator_cpu_s / p.nodes:.1f} ms"),
    ("simulated agents' CPU", lambda p: f"{p.agents_cpu_s:.1f} s"),
    ("operator RSS (most)", lambda p: f"{p.rss_bytes / _MIB:.0f} ({_peak(p)}) MiB"),
    ("object writes a node", lambda p: f"{p.writes_per_node:.2f}"),
    ("status writes a pool a second", lambda p: f"{p.pool_writes_per_s:.2f}"),
    ("writes while quiet", lambda p: f"{p.quiet_writes} in {p.quiet_s:.0f} s"),
    ("CPU while quiet", lambda p: f"{100 * p.quiet_cpu_share:.2f} % of a core"),
    ("CPU a progress report", _per_report),
    ("writes for progress", lambda p: f"{p.progress_writes} in {p.progress_reports} reports"),
    ("restart until in sync", lambda p: f"{p.resync_s:.1f} s, {p.resync_writes} writes"),
    ("reboot storm, p50 / p99 to taint", lambda p: _storm(p.storm_s)),
    ("bare loop, p50 / p99 to taint", lambda p: _storm(p.bare_storm_s)),
    ("storm p99 over the bare loop's", _ratio),
)


def rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """Return the table's rows, one a number."""
    return [(name, *(show(point) for point in points)) for name, show in _ROWS]


def fits(points: Sequence[Point]) -> list[str]:
    """Return one sentence a line: cost for each node, and how far the points lie off it."""
    if len(points) < 3:
        return []
    return [
        _fit(points, "operator CPU", lambda p: p.operator_cpu_s, 1000, "ms a node", "s"),
        _fit(points, "operator RSS", lambda p: p.rss_bytes / _MIB, 1024, "KiB a node", "MiB"),
        _fit(points, "specs", lambda p: p.specs_s, 1000, "ms a node", "s"),
        _fit(points, "opening", lambda p: p.marked_s, 1000, "ms a node", "s"),
    ]


def _fit(  # noqa: PLR0917 - a row of a table
    points: Sequence[Point],
    name: str,
    value: Callable[[Point], float],
    factor: float,
    slope_unit: str,
    unit: str,
) -> str:
    xs, ys = [float(point.nodes) for point in points], [value(point) for point in points]
    slope, base = linear_regression(xs, ys)
    worst = max(abs(y - base - slope * x) / y for x, y in zip(xs, ys, strict=True) if y)
    return (
        f"{name}: {base:.1f} {unit} + {slope * factor:.2f} {slope_unit}; "
        f"no point lies more than {100 * worst:.0f} % off the line"
    )


def print_points(points: Sequence[Point]) -> None:
    """Write the table to standard output, and the lines below it."""
    header = ("NUMBER", *(f"{point.nodes} NODES" for point in points))
    print_table("The operator beside real etcd and kube-apiserver", header, rows(points))
    for line in fits(points):
        print(line)


def document(point: Point) -> dict[str, object]:
    """Return a point for programs."""
    return asdict(point) | {"writes_per_node": point.writes_per_node}


def write_docs(points: Sequence[Point]) -> None:
    """Write docs/benchmarks-cluster.md."""
    cpus, system = os.cpu_count(), f"Linux {platform.release().partition('-')[0]}"
    header = ["", *(f"{point.nodes:,} nodes" for point in points)]
    table = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    table += ["| " + " | ".join(row) + " |" for row in rows(points)]
    text = _TEXT.format(
        machine=f"{cpus} cores, {system}",
        table="\n".join(table),
        fits="\n".join(f"- {line}" for line in fits(points)),
    )
    (_DOCS / "benchmarks-cluster.md").write_text(text, encoding="utf-8")


_TEXT = """# The operator at scale

`python -m benchmarks.control_plane --write-docs` runs it: etcd, kube-apiserver, the operator, the
driver and all simulated agents on one machine ({machine}), so that they take CPU from each other;
compare ratios and slopes rather than seconds. Nodes are 14 KB each and join with the start-up
taint; three pools select all of them.

{table}

{fits}

## How it is measured

- *All specs written*: from the first pool's creation until every node has its HostMemoryNode.
  *Then all nodes open*: the agents start, answer every spec at once, and each node has its
  condition, its labels and no taint any more, which the driver reads back itself.
- *Object writes a node*: HostMemoryNodes and Nodes, status included, by the operator's own counter;
  pool status and events apart. The goal is 6 at most.
- *Quiet*: each kubelet updates its Node's unchanged status every five minutes and renews its Lease
  every ten seconds. The agents send no heartbeats: an agent is alive while its Pod is Ready.
- *Progress*: every agent prepares one of its pools again and reports each step of 10 %, the
  densest that agents report (at most one in 10 s), for a minute; bytes count as ready with their
  whole region. The operator's CPU meanwhile, less what it uses while quiet, over the reports.
- *Restart*: a new process reads everything and knows every node; it has nothing to write.
- *Reboot storm*: 500 nodes show another boot id at once; the time is from the watch event that
  shows it to the one that shows the taint, both seen by a watch of the driver's own. The *bare
  loop* is the shortest program over `kubernetes.aio` that makes the same patch: no queue, no
  record, no retry.
- Simulated agents are one process with one watch; `--agent-liveness=off`.

## One watch instead of two paths

500 nodes, before and after the operator took over the agents' watch, by the same program one after
the other on a busy machine (2 cores); `python -m benchmarks.control_plane 500`. Before, kopf
watched and a second list path compared; CPU until all nodes are open includes the process's start,
about 0.6 s in both.

| operator | before | after |
|---|---|---|
| CPU until all nodes open | 3.96 s, 7.9 ms a node | 2.98 s, 6.0 ms a node |
| CPU a progress report (3,000 in a minute) | 1.31 ms | 0.75 ms |
| CPU while quiet, with heartbeats | 0.27 % of a core | 0.13 % of a core |
| object writes a node | 5.02 | 5.10 |
| writes while quiet | 0 | 0 |
| restart until in sync | 1.2 s | 1.1 s |
| RSS | 104 MiB | 102 MiB |

So 2,000 nodes that prepare at once, at a report each in 10 s, take 15 % of a core instead of 26.
In this benchmark bytes become ready for all nodes within ten seconds: part of a report's cost is
the pools' counts, once a second at most. Decoding is not what is left: a HostMemoryNode takes 13
µs as JSON and 69 µs as a record.

## Under faults

`python -m benchmarks.control_plane.faults` is about crashes, not about speed: 1,000 nodes, three
pools, and at random from a printed seed the operator is killed 100 times and the API server 6
times, watches are cut or end with 410, requests get 429 or 500 from a proxy, nodes reboot or are
made anew, pools change and go, HostMemoryNodes are deleted by hand. An independent watcher holds
every opening against the version of the HostMemoryNode and the boot that the node's marks name.
One run:

| | |
|---|---|
| operator / API server killed | 100 / 6 |
| answers of 429 / 500, watches cut / ended with 410 | 241 / 92, 10 / 9 |
| nodes rebooted / made anew, HostMemoryNodes deleted | 613 / 267, 33 |
| pools changed / deleted / made again | 20 / 17 / 15 |
| openings checked / wrong | 3,820 / 0 |
| `Absent` entries for pools that exist, differences at the end | 0, 0 |

A mutant that ignores the boot and takes unseen pools for deleted is caught by the same watcher.
"""
