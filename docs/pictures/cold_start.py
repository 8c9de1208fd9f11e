"""Measure cold start against attach on this machine, and draw docs/pictures/cold-start.svg.

    sudo .venv/bin/python docs/pictures/cold_start.py

Every number comes from the `hostprep` command: `demo` for the cold start, `prepare` and `attach`
for the other two. The best of several runs is drawn, of each, since what else runs on a machine
only ever adds time.
"""  # noqa: INP001 - a script, no package

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = ("256Mi", "512Mi", "1Gi", "2Gi")
_BACKING = "HugeTLB2Mi"
_RUNS = 4
_PICTURE = Path(__file__).with_name("cold-start.svg")
_NUMBERS = Path(__file__).with_name("cold-start.json")

_LEFT, _WIDTH, _BAR, _GROUP, _TOP = 96, 860, 15, 74, 92
_FONT = 'font-family="system-ui, sans-serif"'
_KINDS = (
    ("cold_s", "#c2410c", "today: fresh 4 KiB pages, one thread"),
    ("scrub_s", "#94a3b8", "attach to a used region, zeroed first"),
    ("attach_s", "#0f766e", "attach to a clean region"),
)


@dataclass(frozen=True, slots=True)
class _Row:
    size: str
    backing: str
    cold_s: float
    attach_s: float
    scrub_s: float


def _hostprep(*arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "hostprep", *arguments, "-o", "json"],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"hostprep {arguments[0]}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def _measure(size: str, root: str) -> _Row:
    cold: list[float] = []
    clean: list[float] = []
    used: list[float] = []
    make = ("prepare", "--name", "picture", "--size", size, "--backing", _BACKING, "--root", root)
    try:
        _hostprep(*make)
        for _ in range(_RUNS):
            shown = _hostprep("demo", "--size", size, "--progress", "none")
            cold.append(shown["cold_s"])
            for _ in range(2):
                _hostprep(*make)  # adopts the region, and zeroes it where it was used
                clean.append(_attach_s(root))
                used.append(_attach_s(root))
    finally:
        _hostprep("release", "picture", "--root", root)
    return _Row(size, _BACKING, min(cold), min(clean), min(used))


def _attach_s(root: str) -> float:
    return float(_hostprep("attach", "--pool", "picture", "--root", root)["attach_s"])


def _text(x: float, y: float, words: str, *, size: int = 13, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" {style}>{words}</text>'


def _words(size: str) -> str:
    return f"{size[:-2]} {size[-2:]}B"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _bars(index: int, row: _Row, longest_s: float) -> list[str]:
    top = _TOP + index * _GROUP
    room = _WIDTH - _LEFT - 170
    lines = [_text(_LEFT - 12, top + 29, _words(row.size), style='text-anchor="end"')]
    for place, (kind, colour, _) in enumerate(_KINDS):
        seconds: float = getattr(row, kind)
        y, long = top + place * (_BAR + 4), max(1.5, room * seconds / longest_s)
        lines.append(
            f'<rect x="{_LEFT}" y="{y}" width="{long:.1f}" height="{_BAR}" fill="{colour}"/>'
        )
        words = _duration(seconds)
        if kind != "cold_s":
            words += f" ({row.cold_s / seconds:.0f} times faster)"
        lines.append(_text(_LEFT + long + 7, y + 12, words, size=12))
    return lines


def _draw(rows: list[_Row]) -> str:
    height = _TOP + len(rows) * _GROUP + 18
    longest_s = max(row.cold_s for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_FONT}>',
        "<title>Cold start against attach</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        '<g fill="#1e293b">',
        _text(20, 28, "An engine starts: time until every page is there", size=17),
    ]
    x = 20
    for _, colour, words in _KINDS:
        lines.append(f'<rect x="{x}" y="48" width="11" height="11" fill="{colour}"/>')
        lines.append(_text(x + 16, 58, words, size=12))
        x += 40 + round(len(words) * 6.1)
    for index, row in enumerate(rows):
        lines += _bars(index, row, longest_s)
    return "\n".join([*lines, "</g>", "</svg>", ""])


def main() -> None:
    """Measure all sizes, write the numbers and the picture."""
    with tempfile.TemporaryDirectory(prefix="hostprep-picture-", dir="/run") as folder:
        rows = [_measure(size, f"{folder}/root") for size in _SIZES]
    numbers = [{name: getattr(row, name) for name in row.__slots__} for row in rows]
    _NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    _PICTURE.write_text(_draw(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
