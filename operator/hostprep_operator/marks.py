"""The annotation `hostprep.dev/marks`: what was put on a Node, and what its last opening rested on.

It makes removal exact and reboots visible: no state of the operator's own survives elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hostprep.api.codec import JsonObject, json_field
from hostprep.api.conditions import format_time, parse_time
from hostprep.api.names import READY_LABEL_PREFIX
from hostprep.api.node_resource import OPERATORS_FIELDS

_VERSION = 1
_OURS = re.compile(re.escape(READY_LABEL_PREFIX) + "[a-z0-9-]{1,63}", re.ASCII)


def _ours(labels: object) -> tuple[str, ...]:
    """Return the keys of ready labels: any other label there is not ours to remove."""
    keys = labels if isinstance(labels, list) else ()
    return tuple(sorted(key for key in keys if isinstance(key, str) and _OURS.fullmatch(key)))


def _texts(value: object) -> Mapping[str, str]:
    items = value.items() if isinstance(value, dict) else ()
    return {key: text for key, text in items if isinstance(key, str) and isinstance(text, str)}


def policy_mark(policy: Mapping[str, Any]) -> str:
    """Return a short text that differs where the memory that a policy asks for does."""
    asked = {name: policy[name] for name in policy if name not in OPERATORS_FIELDS}
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _time(key: str) -> dict[str, Any]:
    return json_field(key=key, omit_empty=True, encode=format_time, decode=parse_time)


_TEXT = json_field(decode=lambda value: value if isinstance(value, str) else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks(JsonObject):
    """The annotation's fields. Times in seconds since the epoch, whole ones."""

    labels: tuple[str, ...] = field(default=(), metadata=json_field(decode=_ours))
    """Keys of the ready labels on the node, sorted."""
    taint: str = field(default="", metadata=_TEXT)
    """The taint key that was last ruled by; empty for a profile without one."""
    closed_s: float | None = field(default=None, metadata=_time("closedAt"))
    """Since when the node is closed; None while it is open, or where the closing needed no marks.
    """
    closed_boot: str = field(default="", metadata=_TEXT)
    opened_s: float | None = field(default=None, metadata=_time("openedAt"))
    """The last opening; kept while the node is closed again."""
    opened_boot: str = field(default="", metadata=_TEXT)
    hmn: str = field(default="", metadata=_TEXT)
    """`<uid>/<resourceVersion>` of the HostMemoryNode that the opening rested on."""
    policies: Mapping[str, str] = field(
        default_factory=dict, metadata=json_field(decode=_texts, omit_empty=True)
    )
    """Pool to `policy_mark` of what the opening rested on. Where the HostMemoryNode is lost, one
    with exactly these policies is made again at once: the memory is still there."""
    deadline: bool = field(default=False, metadata=json_field(decode=lambda value: value is True))
    """The deadline passed in this closing, and was reported."""

    @property
    def is_open(self) -> bool:
        """Whether the node was opened and not closed since."""
        return self.opened_s is not None and self.closed_s is None

    @property
    def is_fresh(self) -> bool:
        """Whether the node was neither opened nor closed so far, as far as marks tell."""
        return self.opened_s is None and self.closed_s is None

    @classmethod
    def parse(cls, text: str) -> Marks:
        """Read the annotation; what cannot be read, since it was edited, counts as not there."""
        try:
            document = json.loads(text) if text else {}
        except ValueError:
            return cls()
        return cls.from_json(document) if isinstance(document, dict) else cls()

    def to_text(self) -> str:
        """Return the annotation: compact, only what is set; empty when nothing is."""
        document = {name: value for name, value in self.to_json().items() if value}
        return json.dumps({"v": _VERSION, **document}, separators=(",", ":")) if document else ""
