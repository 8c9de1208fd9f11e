"""Measure the parts that are named, or all; what is measured already is not measured again."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.gpu_day.day import Day, Figures
from benchmarks.gpu_day.journal import Journal, JournalError
from benchmarks.gpu_day.parts import PARTS
from benchmarks.gpu_day.sizes import available_here, sizes_from, text_of
from benchmarks.register.crew import Crew
from benchmarks.register.cuda import Cuda, CudaError
from benchmarks.register.pages_ledger import give_back_left_pages
from hostprep.errors import HostprepError
from hostprep.units import parse_quantity

ROWS = "rows.jsonl"
_DONE, _CANNOT, _BAD_INPUT, _TIME_WAS_UP = 0, 1, 2, 3
_STANDIN = "Stand-in"
"""What the stand-in driver of the tests calls its devices."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 where all is done, 1 without a GPU, 2 for bad input, 3 where time was up."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _end_in_good_order)
    end_s = time.monotonic() + options.limit_s
    try:
        traits = Cuda().traits()
    except CudaError as error:
        print(f"gpu_day: nothing can be measured here: {error}", file=sys.stderr)
        return _CANNOT
    folder = Path(options.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        give_back_left_pages()
        machine = _machine(traits, is_short=options.short)
        is_rehearsal = bool(machine["standin"] or machine["short"])
        rows = Journal(folder / ROWS, options.before, is_rehearsal=is_rehearsal)
        with contextlib.closing(rows) as journal:
            return _measure(options, journal, traits | machine, end_s)
    except (JournalError, HostprepError, OSError, ValueError) as error:
        print(f"gpu_day: {error}", file=sys.stderr)
        return _BAD_INPUT


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python3 -m benchmarks.gpu_day",
        description=__doc__,
        epilog="\n".join(f"{part.name:<8}{part.about_s:>5.0f} s  {part.what}" for part in PARTS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="OUT_FOLDER", help=f"{ROWS} is appended to there")
    parser.add_argument("parts", nargs="*", metavar="PART", help="of those below; all")
    parser.add_argument(
        "--limit-s", type=float, default=570.0, help="begin nothing that ends later (570)"
    )
    parser.add_argument(
        "--before",
        type=Path,
        action="extend",
        nargs="+",
        default=[],
        metavar="FILE",
        help="rows of earlier runs, which are not measured again; last on the command line",
    )
    parser.add_argument("--again", action="store_true", help="measure what is there as well")
    parser.add_argument("--size", help="of a region; 8Gi, or an eighth of what is available")
    parser.add_argument("--short", action="store_true", help="only that it works: no real number")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in names]
    if unknown:
        parser.error(f"no part of the name {', '.join(unknown)}: there are {', '.join(names)}")
    missing = [str(path) for path in options.before if not path.is_file()]
    if missing:
        parser.error(f"there is no {', '.join(missing)}")
    return options


def _machine(traits: Figures, *, is_short: bool) -> Figures:
    """Return what each row says of where it comes from."""
    name = str(traits["gpu"])
    return {
        "gpu": name,
        "standin": name.startswith(_STANDIN),
        "short": is_short,
        "boot": text_of(Path("/proc/sys/kernel/random/boot_id"))[:8],
    }


def _measure(options: argparse.Namespace, journal: Journal, traits: Figures, end_s: float) -> int:
    asked = parse_quantity(options.size) if options.size else None
    with contextlib.closing(Crew(int(traits["gpus"]), lambda: end_s - time.monotonic())) as crew:
        day = Day(
            journal=journal,
            crew=crew,
            sizes=sizes_from(available_here(), int(traits["gpu_bytes"]), asked),
            machine={name: traits[name] for name in ("gpu", "standin", "short", "boot")},
            folder=Path(options.folder),
            end_s=end_s,
            again=options.again,
            is_short=options.short,
        )
        for part in PARTS:
            if not options.parts or part.name in options.parts:
                day.run(part)
    if day.left_for_later:
        print(f"gpu_day: left for a later call: {len(day.left_for_later)}", file=sys.stderr)
        for case in day.left_for_later:
            print(f"  {case}", file=sys.stderr)
    return _TIME_WAS_UP if day.left_for_later else _DONE


def _end_in_good_order(_signal: int, _frame: FrameType | None) -> None:
    """Give processes and huge pages back; the case that runs stays `begun`."""
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
