"""The kernel's memory zones: /proc/zoneinfo, which containers may read as well."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["MOVABLE", "ZoneCounts", "parse_zoneinfo"]

MOVABLE = "Movable"
"""The zone that long-term pins must first migrate out of (mm/gup.c)."""
_HEAD = re.compile(r"(\d{1,5}), zone +(\w{1,32})", re.ASCII)
_COUNT = re.compile(
    r"^ +(?:pages )?(free|low|present|managed|nr_free_cma) +(\d{1,18}) *$",
    re.ASCII | re.MULTILINE,
)


@dataclass(frozen=True)
class ZoneCounts:
    """What /proc/zoneinfo says of one zone, in base pages."""

    free: int = 0
    low: int = 0
    present: int = 0
    managed: int = 0
    nr_free_cma: int = 0


def parse_zoneinfo(text: str) -> dict[tuple[int, str], ZoneCounts]:
    """Return the counts of every zone, by NUMA node and name. Other lines are skipped.

    What follows `pagesets` is left out unread: six lines for each CPU, a megabyte on big machines.
    """
    zones = {}
    for section in f"\n{text}".split("\nNode "):
        head, _, body = section.partition("\n  pagesets\n")[0].partition("\n")
        match = _HEAD.match(head)
        if match is not None:
            counts = {found[1]: int(found[2]) for found in _COUNT.finditer(body)}
            zones[int(match[1]), match[2]] = ZoneCounts(**counts)
    return zones
