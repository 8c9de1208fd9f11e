"""Measure on this machine's GPU, or say why not; print, and with --write-docs keep, the figures."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

from benchmarks.register.agenda import AGENDA, Item
from benchmarks.register.crew import Crew, MeasureError
from benchmarks.register.cuda import Cuda, CudaError
from benchmarks.register.memory import NotHereError, available_bytes
from benchmarks.register.pages import print_run, write_docs
from benchmarks.register.results import Document, document
from benchmarks.register.scene import Scene, TimeIsUp
from hostprep.backing import GIB, MIB
from hostprep.errors import HostprepError
from hostprep.units import format_bytes, parse_quantity

_MOST_BYTES = 8 * GIB
_LEAST_BYTES = 64 * MIB
_SHARE = 4
"""A run holds the memory twice (cold memory beside resident); as much again stays for others."""


def main() -> int:
    """Return 0 where it was measured, 1 where it cannot be here, 2 for bad input."""
    options = _options()
    try:
        size_bytes = _size(options.size)
        if options.plan:
            _print_plan(size_bytes)
            return 0
        if options.source:
            run: Document = json.loads(Path(options.source).read_text(encoding="utf-8"))
        else:
            names = options.names or [item.name for item in AGENDA]
            run = _measure(names, size_bytes, is_short=options.short)
        _show(run, options)
    except (CudaError, MeasureError) as error:
        print(_without_gpu(str(error)), file=sys.stderr)
        return 1
    except (HostprepError, OSError, ValueError, KeyError, ImportError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


def _options() -> argparse.Namespace:
    names = [item.name for item in AGENDA]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.register", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.add_argument("--plan", action="store_true", help="only list what would be measured")
    parser.add_argument("--short", action="store_true", help="only that it works: no real number")
    parser.add_argument("--size", help="of the memory; 8Gi, or a quarter of what is available")
    parser.add_argument("--from", dest="source", metavar="FILE", help="JSON of an earlier run")
    parser.add_argument("--write-docs", action="store_true", help="the page and its charts")
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"no measurement of the name {', '.join(sorted(unknown))}")
    return options


def _size(asked: str | None) -> int:
    """Return whole 2 MiB pages; whole GiB from one on, for the pages of 1 GiB."""
    size = parse_quantity(asked) if asked else min(_MOST_BYTES, available_bytes() // _SHARE)
    if size < _LEAST_BYTES:
        raise ValueError(f"{format_bytes(size)} is too little to measure with: at least 64Mi")
    page = GIB if size >= GIB else 2 * MIB
    return size // page * page


def _print_plan(size_bytes: int) -> None:
    print(f"With {format_bytes(size_bytes)} of memory, and at most so long for each:")
    for item in AGENDA:
        print(f"  {item.name:<10} {item.allowed_s:>4.0f} s  {item.what}")
    total_s = sum(item.allowed_s for item in AGENDA)
    print(f"  {'all':<10} {total_s:>4.0f} s  and the start of up to eight processes")
    print("Needs: an NVIDIA GPU and driver, cuda-python (pip install cuda-bindings); root for")
    print("pages of 2 MiB, 1 GiB and THP (without: 4 KiB pages only, the rest is left out).")


def _measure(names: list[str], size_bytes: int, *, is_short: bool) -> Document:
    """Raise CudaError where there is nothing to measure with."""
    traits = Cuda().traits()  # no context is made here: neighbours would meet it
    begin_s = time.monotonic()
    gpus = traits["gpus"]
    assert isinstance(gpus, int)
    with contextlib.closing(Crew(gpus)) as crew:
        scene = Scene(crew, size_bytes, is_short)
        crew.rank().ask("free_bytes")  # a context at least, or nothing can be measured
        for item in AGENDA:
            if item.name in names:
                _one(item, scene)
    took_s = time.monotonic() - begin_s
    return document(traits, scene.rows, scene.left_out, size_bytes=size_bytes, took_s=took_s)


def _one(item: Item, scene: Scene) -> None:
    print(f"{item.name}", file=sys.stderr, flush=True)
    scene.clock.allow(item.allowed_s)
    try:
        item.measure(scene)
    except TimeIsUp:
        scene.leave_out(item.name, "the rest", f"its {item.allowed_s:.0f} s were over")
    except (MeasureError, NotHereError) as error:
        scene.leave_out(item.name, "the rest", str(error))


def _show(run: Document, options: argparse.Namespace) -> None:
    if options.write_docs:
        write_docs(run)
    if options.output == "json":
        print(json.dumps(run, indent=1))
    else:
        print_run(run)


def _without_gpu(why: str) -> str:
    return (
        f"benchmarks: nothing can be measured here: {why}\n"
        "Registering is the work of NVIDIA's driver: this needs one of its GPUs, the driver and\n"
        "cuda-python (pip install cuda-bindings). On such a machine, as root and from here:\n"
        "  python -m benchmarks.register -o json > register.json\n"
        "and wherever matplotlib is:\n"
        "  python -m benchmarks.register --from register.json --write-docs\n"
        "`--plan` lists what would be measured."
    )


if __name__ == "__main__":
    sys.exit(main())
