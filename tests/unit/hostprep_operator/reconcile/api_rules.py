"""How the API server takes patches, as far as the operator's need it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hostprep_operator.reconcile.changes import PatchNode, PatchNodeStatus


class ConflictError(Exception):
    """409."""


def merge(target: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def guard(metadata: Mapping[str, Any], name: str, value: str) -> None:
    if metadata[name] != value:
        raise ConflictError(f"{name} is {metadata[name]}, not {value}")


def with_version(write: PatchNode | PatchNodeStatus, version: str) -> PatchNode | PatchNodeStatus:
    metadata = {**write.patch["metadata"], "resourceVersion": version}
    return replace(write, patch={**write.patch, "metadata": metadata})
