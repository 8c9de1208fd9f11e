"""A run of restart to hot as a table, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.lanes import load_averages, two_axes
from hostprep.console import print_table
from hostprep.units import format_bytes

_LONG = {"today": "today", "files": "vLLM's file tier", "kept": "kept by Hostprep"}
_COLORS = {"today": "#c2410c", "files": "#7c3aed", "kept": "#0f766e"}


def print_run(run: dict[str, Any]) -> None:
    """Write the table to standard output, and what was measured below it."""
    columns = [_figures(lane, run["seconds"]) for lane in run["lanes"]]
    rows = [(what, *(column[what] for column in columns)) for what in columns[0]]
    names = (_LONG[lane["name"]] for lane in run["lanes"])
    print_table("Restart to hot", ("AFTER KILL -9", *names), rows)
    print(caption(run))


def caption(run: dict[str, Any]) -> str:
    """Return what the figures are of."""
    load = load_averages(run)
    return (
        f"vLLM's CPU build, random weights, {run['documents']} documents of "
        f"{run['document_tokens']:,} tokens in turn, a new question each time; a host tier of "
        f"{format_bytes(run['size_bytes'])}; {run['machine']}, load average {load}; {run['made']}."
    )


def _figures(lane: dict[str, Any], seconds: float) -> dict[str, str]:
    up_s, answers = lane["up_s"], lane["answers"]
    after = [answer for answer in answers if answer["end_s"] <= up_s + seconds]
    first = after[0] if after else None
    asked = sum(answer["prompt_tokens"] for answer in after)
    cached = sum(answer["cached_tokens"] for answer in after)
    waits = sorted(answer["waited_s"] for answer in after)
    return {
        "the server answers": f"{up_s:.1f} s",
        "first known prompt, to its first token": f"{first['waited_s']:.2f} s" if first else "",
        "  of its prompt's tokens cached": _share(first["cached_tokens"], first["prompt_tokens"])
        if first
        else "",
        f"prompts served in {seconds:.0f} s": str(len(after)),
        "  time to first token, median": f"{waits[len(waits) // 2]:.2f} s" if waits else "",
        "  tokens of prompts and answers": f"{_tokens(after):,}",
        "  hit rate": _share(cached, asked),
        "hits that answer as before": f"{lane['answers_same']} of {lane['answers_compared']}",
        "(before: first time, median)": f"{sorted(lane['fill_waited_s'])[len(lane['fill_waited_s']) // 2]:.2f} s",  # noqa: E501
    }


def _tokens(answers: list[dict[str, Any]]) -> int:
    return sum(answer["prompt_tokens"] + len(answer["tokens"]) for answer in answers)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def draw(run: dict[str, Any], path: Path) -> None:
    """Draw time to first token of each prompt, and below it the tokens served so far."""
    with two_axes(path, (1, 1.3)) as (waits, served):
        until_s = max(lane["up_s"] for lane in run["lanes"]) + run["seconds"]
        for lane in run["lanes"]:
            color, label = _COLORS[lane["name"]], _LONG[lane["name"]]
            answers = [answer for answer in lane["answers"] if answer["end_s"] <= until_s]
            moments = [answer["first_token_s"] for answer in answers]
            waits.plot(moments, [a["waited_s"] for a in answers], ".-", color=color, linewidth=0.6)
            sums, total = [], 0
            for answer in answers:
                total += answer["prompt_tokens"] + len(answer["tokens"])
                sums.append(total)
            ends = [answer["end_s"] for answer in answers]
            served.step(
                [0.0, *ends], [0, *sums], where="post", color=color, linewidth=2, label=label
            )
        waits.set_title(
            "Restart to hot: vLLM killed with -9 and started again, "
            f"{run['documents']} documents of {run['document_tokens']:,} tokens",
            loc="left",
            size=11,
        )
        waits.set_ylabel("seconds to first token")
        waits.set_yscale("log")
        served.set_ylabel("tokens served")
        served.set_xlabel("seconds from kill -9")
        served.set_xlim(0, until_s)
        served.set_ylim(bottom=0)
        served.legend(frameon=False, loc="upper left")
