"""Kopf's settings for thousands of nodes: it watches, and persists nothing on any object."""

# ruff: noqa: ARG002 - the signatures are kopf's
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import kopf

__all__ = ["make_settings"]

_CHUNK = 100
"""Objects a page of kopf's own lists: with 15 KB a Node that is 1.5 MB at once."""
_IDLE_S = 0.05
"""Kopf keeps a task and the last event of each object for so long; the default of 5 s costs 300 MiB
at 5,000 nodes."""
_RETRIES_S = (0.1, 0.3, 1.0, *([2.0] * 300))
"""Ten minutes without an API server, with a look every 2 s."""


class _NoDiffBase(kopf.DiffBaseStorage):
    """Keeps nothing, and spares kopf a deep copy of every object that an event is about."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> Any:
        return {}

    def fetch(self, *, body: kopf.Body) -> None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        return None


class _NoProgress(kopf.ProgressStorage):
    """Keeps nothing: each look is at the whole state, none has to be resumed."""

    def fetch(self, *, key: Any, body: kopf.Body) -> None:
        return None

    def store(self, *, key: Any, record: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        return None

    def purge(self, *, key: Any, body: kopf.Body, patch: kopf.Patch) -> None:
        return None

    def touch(self, *, body: kopf.Body, patch: kopf.Patch, value: str | None) -> None:
        return None

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        return essence


def make_settings(*, agent_selector: str) -> kopf.OperatorSettings:
    """Return the settings; only Pods with these labels are watched."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.watching.chunk_size = _CHUNK
    settings.watching.label_selectors["v1", "pods"] = agent_selector
    settings.queueing.idle_timeout = _IDLE_S
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.execution.max_workers = 1
    settings.networking.enforce_retry_after = True
    settings.networking.error_backoffs = _RETRIES_S
    settings.process.ultimate_exiting_timeout = None
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.persistence.progress_storage = _NoProgress()
    return settings
