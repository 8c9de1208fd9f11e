"""Quantities as Kubernetes writes them, and sizes as people read them."""

from __future__ import annotations

import re

from hostprep.errors import BadInputError

TYPE_CHECKING = False  # as type checkers know it; reading typing takes engines 6 ms
if TYPE_CHECKING:
    from decimal import Decimal

_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:\d{1,20}(?:\.\d{0,9})?|\.\d{1,9}))"
    r"(?P<suffix>Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?\d{1,2})?",
    re.ASCII,
)


def parse_quantity(text: str, *, zero: bool = False, rounds_up: bool = False) -> int:
    """Return the bytes of a Kubernetes quantity such as `8Gi`, `512M` or `1e9`.

    Grammar: k8s.io/apimachinery/pkg/api/resource, less the sub-unit suffixes (m, u, n) and
    negative exponents, which make no sense for bytes, and with at most nine decimals, beyond
    which Kubernetes rounds. A fraction of a byte is refused; `rounds_up` makes it a whole one, as
    Kubernetes does, for sizes that people copy from what was printed: 51.1Gi.

    Raises BadInputError when the text is no quantity, or not a positive one; `zero` allows 0.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or _is_sub_unit(match["suffix"] or ""):
        raise _bad(text, "is not a quantity of bytes")
    value = _value_of(match)
    if rounds_up:
        value = value.to_integral_value(rounding="ROUND_CEILING")
    if value != value.to_integral_value():
        raise _bad(text, "is not a whole number of bytes")
    if value < 0 or (value == 0 and not zero):
        raise _bad(text, "must not be negative" if zero else "must be more than zero")
    if value >= 1 << 63:
        raise _bad(text, "is more than a file can hold")
    return int(value)


def parse_capacity(text: object) -> int:
    """Return a resource quantity of a Node or Pod in whole units, rounded down.

    0 for anything that is no quantity: the text is the API server's own, and zero is common there.
    """
    match = _QUANTITY.fullmatch(str(text).strip())
    value = 0 if match is None else int(_value_of(match))
    return value if 0 < value < 1 << 63 else 0


def _value_of(match: re.Match[str]) -> Decimal:
    from decimal import Decimal  # late: 3 ms that `hostprep exec` can do without

    suffix, number = match["suffix"] or "", Decimal(match["number"])
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    return number.scaleb(_DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:]))


def _is_sub_unit(suffix: str) -> bool:
    return suffix in ("n", "u", "m") or "-" in suffix


def _bad(text: str, why: str) -> BadInputError:
    shown = text if len(text) <= 40 else text[:37] + "..."
    return BadInputError(f"size {shown!r} {why}", remedy="write it like 8Gi or 512Mi")


def format_quantity(size_bytes: int) -> str:
    """Return bytes as an exact Kubernetes quantity: 8Gi, 8704Mi, or a plain number.

    `parse_quantity` gives the same bytes back.
    """
    for suffix, shift in reversed(_BINARY.items()):
        if size_bytes and size_bytes % (1 << shift) == 0:
            return f"{size_bytes >> shift}{suffix}"
    return str(size_bytes)


def format_bytes(size_bytes: int) -> str:
    """Return a size as people read it: the largest binary unit, at most one decimal."""
    for suffix, shift in reversed(_BINARY.items()):
        if shift <= 40 and abs(size_bytes) >= 1 << shift:
            value = size_bytes / (1 << shift)
            return f"{value:.0f} {suffix}B" if value == int(value) else f"{value:.1f} {suffix}B"
    return f"{size_bytes} B"


def format_exact(size_bytes: int) -> str:
    """Return a size in bytes, and as people read it."""
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"


def format_rate(bytes_per_s: float) -> str:
    """Return a rate in GiB/s."""
    return f"{bytes_per_s / (1 << 30):.1f} GiB/s"


def format_seconds(seconds: float) -> str:
    """Return a duration with the precision that a person can use."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min"
