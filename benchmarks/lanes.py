"""What benchmarks that watch engines side by side share: their runs, as table, JSON and picture."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import BenchmarkError
from hostprep.units import format_bytes

_SIZE_INCHES = (9.2, 5.4)


def lanes_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a command line with what `show` reads, and the backing of the prepared memory."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--backing", default="HugeTLB2Mi,Base", help="of the prepared memory")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--from", dest="source", metavar="FILE", help="JSON of an earlier run")
    parser.add_argument("--picture", metavar="FILE", help="draw it, as SVG")
    return parser


def show(
    options: argparse.Namespace,
    run: dict[str, Any],
    *,
    draw: Callable[[dict[str, Any], Path], None],
    print_run: Callable[[dict[str, Any]], None],
) -> None:
    """Print a run as the options say, and draw it where they say so."""
    if options.picture:
        draw(run, Path(options.picture))
    if options.output == "json":
        json.dump(run, sys.stdout)
        print()
    else:
        print_run(run)


def recorded(path: str, *, least_lanes: int = 1) -> dict[str, Any]:
    """Return a run that `-o json` wrote. Raises BenchmarkError for anything else."""
    try:
        run = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{path} is no run that -o json wrote: {error}") from error
    if not isinstance(run, dict) or len(run.get("lanes", ())) < least_lanes:
        raise BenchmarkError(f"{path} is no run that -o json wrote")
    return run


def made_here() -> dict[str, str]:
    """Return when and where a run was made: its `made` and `machine`."""
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "made": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{os.cpu_count()} CPUs, {format_bytes(memory_bytes >> 30 << 30)}, "
        f"Linux {platform.release()}",
    }


def load_averages(run: dict[str, Any]) -> str:
    """Return each lane's load average before and after it, in words."""
    return ", ".join(
        f"{lane['load_average_before']} to {lane['load_average_after']}" for lane in run["lanes"]
    )


@contextlib.contextmanager
def two_axes(path: Path, height_ratios: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """Yield axes one above the other over the same seconds; the same numbers give the same SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "hostprep"
    mpl.rcParams["svg.fonttype"] = "none"
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=_SIZE_INCHES, sharex=True, height_ratios=height_ratios, layout="constrained"
    )
    yield upper, lower
    for axes in (upper, lower):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
