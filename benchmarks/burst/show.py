"""A run of burst to ready as a table, and as the picture of two lanes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lanes import load_averages, two_axes
from hostprep.console import print_table
from hostprep.units import format_bytes

_LONG = {"today": "today", "prepared": "prepared by Hostprep"}
_COLORS = {"today": "#c2410c", "prepared": "#0f766e"}
_START_COLOR = "#e2e8f0"
_STEP_COLORS = {"populate": "#fdba74", "register": "#94a3b8"}
_ROWS = (
    ("healthy_s", "/health answers"),
    ("first_token_s", "first token"),
    ("host_tier_s", "host tier in use"),
)


def print_run(run: dict[str, Any]) -> None:
    """Write the table to standard output, and what was simulated below it."""
    lanes = run["lanes"]
    rows = [
        (words, *(_seconds(lane[key]) for lane in lanes), _times(*(lane[key] for lane in lanes)))
        for key, words in _ROWS
    ]
    for step in ("populate", "register"):
        rows.append((f"took: {step}", *(_seconds(_step(lane, step)) for lane in lanes), ""))
    until_s = min(lane["end_s"] for lane in lanes)
    served = (str(_tokens_until(lane, until_s)) for lane in lanes)
    rows.append((f"tokens served by {until_s:.0f} s", *served, ""))
    names = (_LONG[lane["name"]] for lane in lanes)
    print_table("Burst to ready", ("FROM THE START OF THE PROCESS", *names, "RATIO"), rows)
    print(caption(run))


def caption(run: dict[str, Any]) -> str:
    """Return what the figures are of, and what of them was simulated."""
    size = format_bytes(run["size_bytes"])
    load = load_averages(run)
    runs = "one run of each" + (", at the same time" if run.get("together") else "")
    rest = (
        f"Preparing took {run['prepare_s']:.1f} s before. {run['machine']}, load average {load}; "
        f"{run['made']}."
    )
    told = run["simulated"]
    if told is None:
        return f"vLLM with a host tier of {size} on a real GPU, {runs}. {rest}"
    return (
        f"vLLM's CPU build, a tiny random model, a host tier of {size}, {runs}. The CUDA "
        f"driver is simulated: a stand-in waits {told['base_page_ns']:.0f} ns for each 4 KiB page "
        f"and {told['huge_page_ns'] / 1000:.1f} us for each 2 MiB page, times {told['scale']:.0f}, "
        f"so that registering takes as long as for {format_bytes(told['stands_for_bytes'])}; all "
        f"else is of {size}. {rest}"
    )


def draw(run: dict[str, Any], path: Path) -> None:
    """Draw when each engine did what, and below it the tokens that each has served so far."""
    with two_axes(path, (1, 1.5)) as (lanes, served):
        until_s = max(lane["end_s"] for lane in run["lanes"])
        for place, lane in enumerate(reversed(run["lanes"])):
            _draw_lane(lanes, lane, place, until_s)
            _draw_served(served, lane)
        lanes.set_title(_title(run), loc="left", size=11)
        _draw_legend(lanes, simulated=run["simulated"] is not None)
        names = [_LONG[lane["name"]].replace(" by ", "\nby ") for lane in reversed(run["lanes"])]
        lanes.set_yticks(range(len(names)), names)
        lanes.set_ylim(-0.6, len(names) - 0.1)
        served.set_ylabel("tokens served")
        served.set_xlabel("seconds from the start of the process")
        served.set_xlim(0, until_s)
        served.set_ylim(bottom=0)
        served.legend(frameon=False, loc="upper left")


def _draw_lane(axes: Any, lane: dict[str, Any], place: int, until_s: float) -> None:
    """Draw one bar, starting and serving; its steps in it, or below where it serves meanwhile."""
    color, first_s, tier_s = _COLORS[lane["name"]], lane["first_token_s"], lane["host_tier_s"]
    axes.barh(place, first_s, height=0.44, color=_START_COLOR)
    axes.barh(place, lane["end_s"] - first_s, left=first_s, height=0.44, color=color, alpha=0.85)
    middle_s = (first_s + lane["end_s"]) / 2
    axes.text(middle_s, place, "serves", ha="center", va="center", size=8, color="white")
    for step in lane["steps"]:
        begin_s, took_s = step["begin_s"], step["end_s"] - step["begin_s"]
        step_color = _STEP_COLORS[step["name"]]
        words = f"{step['name']} {took_s:.0f} s"
        if lane["name"] == "today":
            axes.barh(place, took_s, left=begin_s, height=0.44, color=step_color)
            if took_s > until_s / 15:
                words, middle_s = words.replace(" ", "\n", 1), begin_s + took_s / 2
                axes.text(middle_s, place, words, ha="center", va="center", size=8)
        else:
            axes.barh(place - 0.3, took_s, left=begin_s, height=0.12, color=step_color)
            axes.text(begin_s, place - 0.3, f"{words} ", ha="right", va="center", size=8)
    axes.text(first_s, place + 0.27, f"first token {first_s:.0f} s", size=8, ha="center")
    axes.plot((tier_s, tier_s), (place - 0.36, place + 0.22), color="black", linewidth=1.4)
    axes.text(tier_s, place - 0.36, f" host tier {tier_s:.0f} s", size=8, va="center")


def _draw_legend(axes: Any, *, simulated: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    register = "register with CUDA" + (" (simulated)" if simulated else "")
    handles = [
        Patch(color=_START_COLOR, label="vLLM's own start"),
        Patch(color=_STEP_COLORS["populate"], label="populate host memory"),
        Patch(color=_STEP_COLORS["register"], label=register),
        Line2D([], [], color="black", linewidth=1.4, label="host tier in use"),
    ]
    axes.legend(
        handles=handles,
        frameon=False,
        fontsize=8,
        ncols=len(handles),
        columnspacing=1.2,
        loc="upper left",
        bbox_to_anchor=(-0.01, -0.02),
        handlelength=1.2,
    )


def _draw_served(axes: Any, lane: dict[str, Any]) -> None:
    moments = lane["tokens_s"]
    axes.step(
        [0.0, *moments, lane["end_s"]],
        [0, *range(1, len(moments) + 1), len(moments)],
        where="post",
        color=_COLORS[lane["name"]],
        linewidth=2,
        label=_LONG[lane["name"]],
    )


def _title(run: dict[str, Any]) -> str:
    size = format_bytes(run["size_bytes"])
    told = run["simulated"]
    if told is None:
        return f"Burst to ready: vLLM, a host tier of {size}"
    return (
        f"Burst to ready: vLLM's CPU build, a host tier of {size}\n"
        f"CUDA driver simulated: registering takes as long as for "
        f"{format_bytes(told['stands_for_bytes'])}"
    )


def _step(lane: dict[str, Any], name: str) -> float | None:
    found = [step["end_s"] - step["begin_s"] for step in lane["steps"] if step["name"] == name]
    return sum(found) if found else None


def _tokens_until(lane: dict[str, Any], until_s: float) -> int:
    return sum(moment <= until_s for moment in lane["tokens_s"])


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _times(today: float | None, prepared: float | None) -> str:
    return f"{today / prepared:.1f}" if today and prepared else ""
