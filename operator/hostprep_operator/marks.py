"""The annotation `hostprep.dev/marks`: what was put on a Node, and what its last opening rested on.

It makes removal exact and reboots visible: no state of the operator's own survives elsewhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from hostprep.api.conditions import format_time, parse_time
from hostprep.api.names import READY_LABEL_PREFIX

_VERSION = 1
_OURS = re.compile(re.escape(READY_LABEL_PREFIX) + "[a-z0-9-]{1,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The annotation's fields. Times in seconds since the epoch, whole ones."""

    labels: tuple[str, ...] = ()
    """Keys of the ready labels on the node, sorted."""
    taint: str = ""
    """The taint key that was last ruled by; empty for a profile without one."""
    closed_s: float | None = None
    """Since when the node is closed; None while it is open, or where the closing needed no marks.
    """
    closed_boot: str = ""
    opened_s: float | None = None
    """The last opening; kept while the node is closed again."""
    opened_boot: str = ""
    hmn: str = ""
    """`<uid>/<resourceVersion>` of the HostMemoryNode that the opening rested on."""
    deadline: bool = False
    """The deadline passed in this closing, and was reported."""

    @property
    def is_open(self) -> bool:
        """Whether the node was opened and not closed since."""
        return self.opened_s is not None and self.closed_s is None

    @classmethod
    def parse(cls, text: str) -> Marks:
        """Read the annotation; what cannot be read, since it was edited, counts as not there."""
        try:
            document = json.loads(text) if text else {}
        except ValueError:
            return cls()
        if not isinstance(document, dict):
            return cls()
        labels = document.get("labels")
        return cls(
            labels=_ours(labels),
            taint=_text(document, "taint"),
            closed_s=parse_time(document.get("closedAt")),
            closed_boot=_text(document, "closedBoot"),
            opened_s=parse_time(document.get("openedAt")),
            opened_boot=_text(document, "openedBoot"),
            hmn=_text(document, "hmn"),
            deadline=document.get("deadline") is True,
        )

    def to_text(self) -> str:
        """Return the annotation: compact, only what is set; empty when nothing is."""
        document: dict[str, Any] = {
            "labels": list(self.labels),
            "taint": self.taint,
            "closedAt": "" if self.closed_s is None else format_time(self.closed_s),
            "closedBoot": self.closed_boot,
            "openedAt": "" if self.opened_s is None else format_time(self.opened_s),
            "openedBoot": self.opened_boot,
            "hmn": self.hmn,
            "deadline": self.deadline,
        }
        document = {name: value for name, value in document.items() if value}
        return json.dumps({"v": _VERSION, **document}, separators=(",", ":")) if document else ""

    def closed(self, *, now_s: float, boot_id: str, taint: str) -> Marks:
        """Return the marks of a closing, which starts a new deadline."""
        return replace(
            self, closed_s=_whole(now_s), closed_boot=boot_id, taint=taint, deadline=False
        )

    def opened(self, *, now_s: float, boot_id: str, hmn: str, taint: str) -> Marks:
        """Return the marks of an opening."""
        return Marks(
            labels=self.labels, taint=taint, opened_s=_whole(now_s), opened_boot=boot_id, hmn=hmn
        )


def _ours(labels: object) -> tuple[str, ...]:
    """Return the keys of ready labels: any other label there is not ours to remove."""
    keys = labels if isinstance(labels, list) else ()
    return tuple(sorted(key for key in keys if isinstance(key, str) and _OURS.fullmatch(key)))


def _whole(seconds: float) -> float:
    return float(int(seconds))


def _text(document: dict[str, Any], name: str) -> str:
    value = document.get(name)
    return value if isinstance(value, str) else ""
