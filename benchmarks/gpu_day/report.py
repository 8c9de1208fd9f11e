"""Tables and charts from the rows of a day: `python -m benchmarks.gpu_day.report ROWS...`.

Prints tables; with --write-docs docs/benchmarks-register.md and its charts, which needs matplotlib.
Rows of the stand-in driver, and of --short, are shown as what they are, and refused for the page.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.journal import Row, last_rows, read_rows
from benchmarks.gpu_day.parts import PARTS
from benchmarks.gpu_day.rates import COLD, VLLM_32, VLLM_33
from benchmarks.measure import AtLeast, Below, Reach, Result, Sample
from hostprep.units import format_bytes, format_seconds

_DOCS = Path(__file__).parents[2] / "docs"
_NAME = "benchmarks-register"
_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"
_REHEARSAL = (
    "REHEARSAL: rows of the stand-in driver, or of a short run. They show that the program works. "
    "No figure here is a result."
)
_STALL_S = 0.25
_PACE = 0.9
_NAMED_BY_THE_CASE = ("backing", "chunk", "gap", "processes", "loop", "way", "registrations")
_LONG_FACTS = ("buddyinfo", "module_parameters", "zones")
"""They stay in the rows."""


class ReportError(Exception):
    """No page can be made of these rows; in words."""


def check_for_page(rows: Sequence[Row]) -> None:
    """Raise ReportError unless all rows are of a real GPU."""
    unreal = [row for row in rows if row.is_rehearsal]
    if unreal:
        kind = "of the stand-in driver" if unreal[0].is_standin else "of a short run"
        raise ReportError(
            f"{len(unreal)} of {len(rows)} rows are {kind}: they are no results and make no page"
        )
    if not any(row.outcome == "measured" for row in rows):
        raise ReportError("nothing was measured, and that makes no page")


def write_page(rows: Sequence[Row], folder: Path = _DOCS) -> None:
    """Put the figures between the page's marks, and draw its charts beside it."""
    from benchmarks.chart import draw  # late: only these need matplotlib
    from benchmarks.gpu_day.charts import draw_decode, draw_rates, draw_stalls

    check_for_page(rows)
    results = headlines(rows)
    pictures = []
    if results:
        draw(results, folder / f"{_NAME}.svg")
        pictures.append(f"![Ratio of every rival to Hostprep]({_NAME}.svg)\n")
    for kind, title, draw_it in (
        ("rates", "Rates by pages and chunks", draw_rates),
        ("stalls", "Stalls inside the process by chunk and gap", draw_stalls),
        ("decode", "Time between tokens", draw_decode),
    ):
        if draw_it(rows, folder / f"{_NAME}-{kind}.svg"):
            pictures.append(f"![{title}]({_NAME}-{kind}.svg)\n")
    page = folder / f"{_NAME}.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    text = "\n".join([*lines(rows), "", *pictures])
    page.write_text(f"{before}{_BEGIN}\n{text}{_END}{after}", encoding="utf-8")


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Return all tables as Markdown."""
    if any(row.is_rehearsal for row in rows):
        yield f"**{_REHEARSAL}**"
        yield ""
    yield from _facts(rows)
    yield from _titled("Beside its rivals", _headline_table(headlines(rows)))
    for part in PARTS[1:]:
        ours = [row for row in rows if row.part == part.name and row.outcome == "measured"]
        for group in dict.fromkeys(_group(row) for row in ours):
            title = f"{part.what[0].upper()}{part.what[1:]}" if not group else group.capitalize()
            yield from _titled(title, _table([row for row in ours if _group(row) == group]))
    yield from _not_measured(rows)


def _facts(rows: Sequence[Row]) -> Iterator[str]:
    days = {time.strftime("%Y-%m-%d", time.gmtime(row.machine.get("at_s", 0))) for row in rows}
    gpus = dict.fromkeys(str(row.machine.get("gpu", "?")) for row in rows)
    yield f"{', '.join(sorted(days))}; {', '.join(gpus)}."
    yield ""
    for row in rows:
        if row.part == "facts" and row.outcome == "measured":
            facts = [
                f"{_heading(name)} {_cell(name, value)}"
                for name, value in row.figures.items()
                if name not in _LONG_FACTS and value not in ("", [], {})
            ]
            yield f"- {row.case}: {'; '.join(facts)}"


def _titled(title: str, table: list[list[str]]) -> Iterator[str]:
    if len(table) > 1:
        header, *body = table
        yield from ("", f"**{title}**", "")
        yield f"| {' | '.join(header)} |"
        yield "|" + "---|" * len(header)
        for row in body:
            yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _group(row: Row) -> str:
    """Return what a case's name begins with: cases of one table have it in common."""
    return row.case.partition(": ")[0] if ": " in row.case else ""


def _table(rows: Sequence[Row]) -> list[list[str]]:
    figures = [_flat(row.figures) for row in rows]
    if rows[0].part == "probes":
        return [["", "answer"], *([row.case, _answer(row.figures)] for row in rows)]
    names = list(dict.fromkeys(name for one in figures for name in one))
    gpus = {row.machine.get("gpu") for row in rows}
    more = ["GPU"] if len(gpus) > 1 else []
    table = [["", *(_heading(name) for name in names), *more]]
    for row, one in zip(rows, figures, strict=True):
        cells = [_cell(name, one.get(name)) for name in names]
        where = [str(row.machine.get("gpu"))] if more else []
        table.append([row.case.partition(": ")[2] or row.case, *cells, *where])
    return table


def _flat(figures: dict[str, Any]) -> dict[str, Any]:
    """Return figures with those inside others beside them; three numbers of durations stay one."""
    found: dict[str, Any] = {}
    for name, value in figures.items():
        if name in _NAMED_BY_THE_CASE:
            continue
        if isinstance(value, dict) and "p50_s" not in value and "failed" not in value:
            found.update(_flat(value))
        else:
            found[name] = value
    return found


def _answer(figures: dict[str, Any]) -> str:
    return "; ".join(f"{_heading(name)}: {_cell(name, value)}" for name, value in figures.items())


def _heading(name: str) -> str:
    if name == "gib_s":
        return "GiB/s"
    for suffix, unit in (("_gib_s", ", GiB/s"), ("_bytes_per_gib", " for each GiB"), ("_s", "")):
        name = name.removesuffix(suffix) + (unit if name.endswith(suffix) else "")
    return name.replace("_", " ").removesuffix(" bytes")


def _cell(name: str, value: Any) -> str:
    if isinstance(value, dict):
        if "p50_s" in value:
            text = " · ".join(_short(value[key]) for key in ("p50_s", "p99_s", "worst_s"))
            return f"{text} ({100 * value['time_share']:.0f} %)" if "time_share" in value else text
        return ", ".join(f"{key}: {_cell(key, one)}" for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_cell(name, one) for one in value)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return {True: "yes", False: "no"}.get(value, str(value)).replace("\n", " ")
    return _number(name, value)


def _number(name: str, value: float) -> str:
    if "_bytes" in name:
        return format_bytes(round(value))
    if name.endswith("gib_s"):
        return f"{value:.1f}"
    if name == "pace":
        return f"{100 * value:.0f} %"
    return _short(value) if name.endswith("_s") else str(value)


def _short(seconds: float) -> str:
    """Return a duration in the page's words; what is below a millisecond in microseconds."""
    return f"{seconds * 1e6:.0f} µs" if 0 <= seconds < 0.001 else format_seconds(seconds)


def _not_measured(rows: Sequence[Row]) -> Iterator[str]:
    """Return what failed and what was left out, once for each reason."""
    for outcome, title in (("failed", "Failed:"), ("left out", "Left out:")):
        whys: dict[str, list[str]] = {}
        for row in rows:
            if row.outcome == outcome:
                whys.setdefault(row.why, []).append(f"{row.part}: {row.case}")
        if whys:
            yield from ("", title, "")
        for why, cases in whys.items():
            more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
            yield f"- {cases[0]}{more}: {why}"


def headlines(rows: Sequence[Row]) -> list[Result]:
    """Return the ratios that goals are about; those whose figures are not there are left out."""
    found = {(row.part, row.case): row.figures for row in rows if row.outcome == "measured"}
    ours, base = "from birth: HugeTLB2Mi, steered", "from birth: Base, steered"
    huge, cold = "register resident 2 MiB pages", f"from birth: {COLD}"
    pairs: list[tuple[str, str, str, str, str, Reach | None]] = [
        (huge, "rates", ours, "rates", cold, AtLeast(5)),
        (huge, "rates", ours, "rates", f"from birth: {VLLM_32}", None),
        (huge, "rates", ours, "rates", f"from birth: {VLLM_33}", None),
        (huge, "rates", ours, "rates", "from birth: cudaHostAlloc", None),
        ("register resident 4 KiB pages", "rates", base, "rates", cold, None),
        (
            "two ranks, slices in turns",
            "rates",
            "two ranks: a slice each, in turns",
            "rates",
            "two ranks: all of it each, in one call",
            None,
        ),
        (
            "a second process",
            "copies",
            "handles: the same bytes registered there",
            "copies",
            "handles: created, exported, mapped by a second process",
            None,
        ),
    ]
    results = [
        _against(number, found[part, case], rival, found[rival_part, rival], reach)
        for number, part, case, rival_part, rival, reach in pairs
        if (part, case) in found and (rival_part, rival) in found
    ]
    return [*results, *_decode(found), *_stalls(found)]


def _against(
    number: str, ours: dict[str, Any], name: str, rival: dict[str, Any], reach: Reach | None
) -> Result:
    """Return the ratio of medians: rounds were not made in turns, and their numbers may differ."""
    ours_s, rival_s = (Sample(tuple(figures["took_s"])) for figures in (ours, rival))
    middle = statistics.median(ours_s.values)
    ratio = Sample(tuple(value / middle for value in rival_s.values), "×")
    size = format_bytes(int(ours["size_bytes"]))
    return Result(f"{number}, {size}", ours_s, name.partition(": ")[2], rival_s, ratio, reach)


def _decode(found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[Result]:
    """Return what is left of the pace, and the longest wait for a token beside one call's."""
    for backing in ("Base", "HugeTLB2Mi"):
        ours = found.get(("decode", f"torch: {backing}, hostprep"))
        rival = found.get(("decode", f"torch: {backing}, one call"))
        if ours is not None:
            pace, alone = Sample((100 * ours["pace"],), "%"), Sample((100.0,), "%")
            ratio = Sample((ours["pace"],), "×")
            number = f"decode pace meanwhile, {backing}"
            yield Result(number, pace, "the loop alone", alone, ratio, AtLeast(_PACE))
        if ours is not None and rival is not None:
            ours_s, rival_s = (one["meanwhile"]["worst_s"] for one in (ours, rival))
            yield Result(
                f"longest wait for a token, {backing}",
                Sample((ours_s,)),
                "one call",
                Sample((rival_s,)),
                Sample((rival_s / ours_s,), "×"),
            )


def _stalls(found: dict[tuple[str, str], dict[str, Any]]) -> Iterator[Result]:
    ours = found.get(("stalls", "neighbours: HugeTLB2Mi, steered"), {}).get("neighbours", {})
    cold = found.get(("stalls", f"neighbours: {COLD}"), {}).get("neighbours", {})
    for neighbour, figures in ours.items():
        if "worst_s" not in figures or "worst_s" not in cold.get(neighbour, {}):
            continue
        ours_s, rival_s = figures["worst_s"], cold[neighbour]["worst_s"]
        yield Result(
            f"worst stall of a neighbour: {neighbour}",
            Sample((ours_s,)),
            COLD,
            Sample((rival_s,)),
            Sample((rival_s / ours_s,), "×"),
            # A fresh context takes as long by itself; the goal is about those that run.
            None if neighbour == "context" else Below(_STALL_S, "250 ms"),
        )


def _headline_table(results: Sequence[Result]) -> list[list[str]]:
    table = [["", "ours", "rival", "", "ratio", "goal", "met"]]
    for result in results:
        met = {True: "yes", False: "NO", None: ""}[result.met]
        ours, rival = _median(result.ours), _median(result.rival)
        ratio = f"{result.ratio.median:.2f}"
        goal = str(result.reach or "")
        table.append([result.number, ours, rival, result.rival_name, ratio, goal, met])
    return table


def _median(sample: Sample) -> str:
    return f"{sample.median:.0f} %" if sample.unit == "%" else _short(sample.median)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0, or 2 where no page can be made of these rows."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day.report", description=__doc__
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="ROWS", help="of one day or several")
    parser.add_argument("--write-docs", action="store_true", help="the page and its charts")
    options = parser.parse_args(arguments)
    try:
        rows = last_rows(read_rows(options.files))
        if options.write_docs:
            write_page(rows)
    except (ReportError, OSError, ImportError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
