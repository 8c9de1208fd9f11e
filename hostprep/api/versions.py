"""The API's versions, v1alpha1 and v1beta1: one structure, and two spellings of some choices.

Both are served, v1alpha1 is stored, and nothing is converted. So an object keeps the spelling that
it was written with, in either version: whoever reads a choice takes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hostprep.api.names import GROUP, VERSION

WRITTEN_VERSION = "v1beta1"
"""What people write, and what we print. Agent and operator talk VERSION, which is stored."""
WRITTEN_API_VERSION = f"{GROUP}/{WRITTEN_VERSION}"
SERVED_API_VERSIONS = (WRITTEN_API_VERSION, f"{GROUP}/{VERSION}")

OLD_SPELLINGS: Mapping[tuple[str, ...], Mapping[str, str]] = {
    ("attach", "mode"): {"hostPath": "HostPath", "devicePlugin": "DevicePlugin"},
    ("boot",): {"none": "None", "systemd": "Systemd"},
}
"""By a field's path in a pool's spec: what v1alpha1 takes as well, and what it is in v1beta1."""


def choice(spec: Mapping[str, Any], *path: str) -> object:
    """Return a choice of a pool's spec or of a node's policy, in v1beta1's spelling.

    None where it is not given.
    """
    found: object = spec
    for step in path:
        found = found.get(step) if isinstance(found, Mapping) else None
    known = OLD_SPELLINGS.get(path, {})
    return known.get(found, found) if isinstance(found, str) else found


def respelled(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a pool's spec, or of a node's policy, with the choices as in v1beta1."""
    copy = dict(spec)
    for path, known in OLD_SPELLINGS.items():
        copy = _respell(copy, path, known)
    return copy


def _respell(
    document: Mapping[str, Any], path: tuple[str, ...], known: Mapping[str, str]
) -> dict[str, Any]:
    head, *rest = path
    value = document.get(head)
    if rest and isinstance(value, Mapping):
        value = _respell(value, tuple(rest), known)
    elif not rest and isinstance(value, str):
        value = known.get(value, value)
    return {**document, head: value} if head in document else dict(document)
