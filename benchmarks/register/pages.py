"""A run as tables for people, as a page, and as charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.register.agenda import AGENDA
from benchmarks.register.results import Document, headlines
from hostprep.units import format_bytes, format_seconds

_DOCS = Path(__file__).parent.parent.parent / "docs"
_BEGIN, _END = "<!-- figures: begin -->", "<!-- figures: end -->"
_Row = dict[str, Any]


def print_run(run: Document) -> None:
    """Write all tables to standard output, in plain text: no library is needed."""
    print("\n".join(_lines(run)))


def write_docs(run: Document, folder: Path = _DOCS) -> None:
    """Put the figures into docs/benchmarks-register.md, and draw its charts beside it."""
    from benchmarks.chart import draw  # late: only these need matplotlib
    from benchmarks.register.rate_chart import draw_rates

    draw(headlines(run), folder / "benchmarks-register.svg")
    draw_rates(run["rows"], folder / "benchmarks-register-rates.svg")
    page = folder / "benchmarks-register.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    pictures = (
        "![Ratio of every rival to Hostprep](benchmarks-register.svg)\n\n"
        "![Rates by pages and chunks](benchmarks-register-rates.svg)"
    )
    figures = "\n".join(_lines(run, markdown=True))
    after = rest.partition(_END)[2]
    text = f"{before}{_BEGIN}\n{figures}\n\n{pictures}\n{_END}{after}"
    page.write_text(text, encoding="utf-8")


def _lines(run: Document, *, markdown: bool = False) -> Iterator[str]:
    at = run["machine"]
    gpu = f"{at.get('gpus', '?')} x {at.get('gpu', 'GPU')}"
    yield (
        f"{at['date']}: {gpu}; {at['driver']}; CUDA {at.get('cuda_version', '?')}; Linux "
        f"{at['kernel']}, {at['cpus']} CPUs ({at['cpu']}); {format_bytes(run['size_bytes'])}; "
        f"the run took {format_seconds(run['took_s'])}."
    )
    tables = [("Beside its rivals", _headlines(run))]
    tables += [(item.what, _rows(run, item.name)) for item in AGENDA]
    for title, rows in tables:
        if len(rows) > 1:
            yield ""
            yield f"**{title}**" if markdown else f"{title}:"
            yield ""
            yield from _table(rows) if markdown else _columns(rows)
    if run["left_out"]:
        yield ""
        yield "Left out:"
        yield ""
        for one in run["left_out"]:
            yield f"- {one['measurement']}: {one['what']}: {one['why']}"


def _headlines(run: Document) -> list[list[str]]:
    rows = [["", "ours", "rival", "", "ratio", "reach", "met"]]
    for result in headlines(run):
        met = {True: "yes", False: "NO", None: ""}[result.met]
        ours, rival = format_seconds(result.ours.median), format_seconds(result.rival.median)
        ratio = f"{result.ratio.median:.2f}"
        reach = str(result.reach or "")
        rows.append([result.number, ours, rival, result.rival_name, ratio, reach, met])
    return rows


def _rows(run: Document, name: str) -> list[list[str]]:
    rows: list[_Row] = [row for row in run["rows"] if row["measurement"] == name]
    names = list(dict.fromkeys(key for row in rows for key in row if key != "measurement"))
    header = [_heading(name) for name in names]
    return [header, *([_cell(key, row.get(key)) for key in names] for row in rows)]


def _heading(name: str) -> str:
    for suffix, unit in (("_gib_s", ", GiB/s"), ("_bytes_per_gib", " for each GiB"), ("_s", "")):
        name = name.removesuffix(suffix) + (unit if name.endswith(suffix) else "")
    return name.replace("_", " ").removesuffix(" bytes")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(_cell(name, one) for one in value)
    if name == "chunk":
        return value if isinstance(value, str) else format_bytes(value) if value else "everything"
    if "_bytes" in name:
        return format_bytes(round(value))
    if name.endswith("_gib_s"):
        return f"{value:.1f}"
    return format_seconds(value) if name.endswith("_s") else str(value)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    header, *body = rows
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" * len(header)
    for row in body:
        yield f"| {' | '.join(row)} |"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
