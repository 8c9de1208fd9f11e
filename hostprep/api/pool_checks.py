"""Checks of a HostMemoryPool's fields: each says what is wrong and what to write instead."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping

from pydantic_core import PydanticCustomError

from hostprep.api.pool_spec import RegionLayout
from hostprep.api.schema import pool_schema
from hostprep.backing import Backing
from hostprep.errors import BadInputError
from hostprep.units import parse_quantity

MAX_REGIONS = 1024
MAX_GROUPS_IN_ALL = 8192
"""Of all regions: more do not fit into a handoff."""
MAX_SIZE_BYTES = 1 << 50
"""1Pi: more than any node has, and less than where CEL's floating point becomes inexact."""
LAYOUTS = tuple(one.value for one in RegionLayout if one is not RegionLayout.COUNT)
QUALIFIED_KEY = (
    "([a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?"
    "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
"""A key of a label, an annotation or a taint, as Kubernetes wants it."""
LABEL_VALUE = "([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
_KEY = re.compile(QUALIFIED_KEY, re.ASCII)
_VALUE = re.compile(LABEL_VALUE, re.ASCII)
_MODE = re.compile(r"0?[0-7]{3}", re.ASCII)
_GROUP = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_PERCENTAGE = re.compile(r"(100|[1-9][0-9]?)%", re.ASCII)
_MAX_PREFIX_CHARS = 253
_MAX_LABEL_CHARS = 63
_MAX_SELECTOR_KEYS: int = pool_schema("spec.nodeSelector")["maxProperties"]
_MAX_TERMS: int = pool_schema("spec.nodeSelectorTerms")["maxItems"]
_MAX_VALUES: int = pool_schema("spec.nodeSelectorTerms[].matchExpressions[].values")["maxItems"]
_MAX_GROUPS: int = pool_schema("spec.sizing.groups")["maxItems"]
_MAX_ANNOTATION_BYTES = 256 << 10
_MAX_INT32 = (1 << 31) - 1
_OWNER_MAY = 0o600
_OTHERS_TAINTS = (
    "node.kubernetes.io/",
    "node-role.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
)
OUR_TAINTS = ("hostprep", "host-memory")
"""One of these words stands in every taint's key that is taken off nodes."""
_KEY_RULE = (
    "write a name of at most 63 letters, digits, hyphens, dots and underscores, with or without "
    "a DNS domain and a slash before it"
)
_VALUE_RULE = (
    "write at most 63 letters, digits, hyphens, dots and underscores, beginning and ending with "
    "a letter or digit"
)


def fail(why: str, remedy: str, *, field: str = "") -> PydanticCustomError:
    """Return an error that is shown as it is: what is wrong, what to write instead.

    `field` names the one within the checked value that is to blame.
    """
    context = {"why": why, "remedy": remedy, "field": field}
    return PydanticCustomError("hostprep", "{why}", context)


def _shown(value: object) -> str:
    return repr(str(value)[:40])


def whole(value: object) -> object:
    """Take 1.0 for 1, as JSON and the API server do; leave all else to the field's own type."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    return value


def whole_percent(value: float | None) -> float | None:
    """Return the share if it is a whole number."""
    if value is not None and not value.is_integer():
        raise fail(f"{value} is not a whole number of percent", f"write {round(value) or 1}")
    return value


def quantity(value: object, *, zero: bool = False) -> int:
    """Return the bytes of a quantity: more than 0 (`zero` allows 0), and at most 1Pi."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise fail(f"{_shown(value)} is not a quantity", "write it like 8Gi or 512Mi")
    if isinstance(value, int) and value.bit_length() > 64:
        raise fail("is more than a file can hold", "write it like 8Gi or 512Mi")
    text = str(value)
    if text != text.strip():
        raise fail(f"{_shown(value)} is not a quantity: it has spaces", "write it like 8Gi")
    try:
        size_bytes = parse_quantity(text, zero=zero)
    except BadInputError as error:
        raise fail(error.message, error.remedy or "write it like 8Gi") from error
    if size_bytes > MAX_SIZE_BYTES:
        raise fail(f"{_shown(value)} is more than any node has", "write at most 1Pi")
    return size_bytes


def mode(value: object) -> int:
    """Return the mode that an octal text such as "0660" stands for."""
    if not isinstance(value, str) or _MODE.fullmatch(value) is None:
        shown = repr(value[:40]) if isinstance(value, str) else "a value without quotes"
        raise fail(f"{shown} is no octal mode in quotes", 'write it like mode: "0660"')
    bits = int(value, 8)
    if bits & _OWNER_MAY != _OWNER_MAY:
        raise fail(f"{value!r} bars the owner from reading or writing", 'use "0600" or more')
    if bits & stat.S_IWOTH:
        raise fail(f"{value!r} lets everybody write", 'use "0660", and a gid for who may write')
    return bits


def backing(value: object) -> Backing:
    """Return the backing of that name."""
    known = {one.value: one for one in Backing}
    if isinstance(value, str) and value in known:
        return known[value]
    raise fail(f"there is no backing {_shown(value)}", "choose from " + ", ".join(known))


def backings(value: object) -> object:
    """Refuse an empty list and one that names a backing twice; its items are checked after."""
    if not isinstance(value, list):
        return value
    if not value:
        raise fail("backings is empty", "name at least one, such as HugeTLB2Mi")
    for index, item in enumerate(value):
        if item in value[:index]:
            raise fail(f"backings names {_shown(item)} twice", "name each once, in order")
    return tuple(value)


def group_name(value: str) -> str:
    """Return the name if a group of slots may have it."""
    if _GROUP.fullmatch(value) is None:
        raise fail(
            f"{_shown(value)} is no name of a group",
            "write lower-case letters, digits and hyphens, such as window-1024",
        )
    return value


def integration(value: str | None) -> str | None:
    """Return the name if an integration may have it; the engines' half knows which there are."""
    if value is not None and _GROUP.fullmatch(value) is None:
        raise fail(
            f"{_shown(value)} is no name of an integration",
            "write what `hostprep exec --engine` is given, such as vllm-offloading",
        )
    return value


def groups(value: object) -> object:
    """Refuse a list that is empty, too long or names a group twice; its items come after."""
    if not isinstance(value, list):
        return value
    if not 1 <= len(value) <= _MAX_GROUPS:
        raise fail(f"has {len(value)} groups", f"give 1 to {_MAX_GROUPS}")
    names = [item.get("name") for item in value if isinstance(item, dict)]
    for index, name in enumerate(names):
        if isinstance(name, str) and name in names[:index]:
            raise fail(f"names group {_shown(name)} twice", "give each group a name of its own")
    return tuple(value)


def regions(value: object) -> object:
    """Return a layout's name or a number of regions."""
    if _is_count(value, MAX_REGIONS) or value in LAYOUTS:
        return value
    raise fail(
        f"{_shown(value)} is no way to cut a pool",
        f"choose from {', '.join(LAYOUTS)}, or a number from 1 to {MAX_REGIONS}",
    )


def max_unavailable(value: object) -> object:
    """Return a number of nodes, or a percentage from "1%" to "100%"."""
    if _is_count(value, _MAX_INT32) or (isinstance(value, str) and _PERCENTAGE.fullmatch(value)):
        return value
    raise fail(
        f"{_shown(value)} is neither a number of nodes nor a percentage",
        'write a number from 1, or a percentage from "1%" to "100%"',
    )


def partition_nodes(value: object) -> object:
    """Return a number of nodes, 0 included, or a percentage from "0%" to "100%"."""
    if value == "0%" or (type(value) is int and value == 0):
        return value
    if _is_count(value, _MAX_INT32) or (isinstance(value, str) and _PERCENTAGE.fullmatch(value)):
        return value
    raise fail(
        f"{_shown(value)} is neither a number of nodes nor a percentage",
        'write a number from 0, or a percentage from "0%" to "100%"',
    )


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def selector(value: Mapping[str, str]) -> Mapping[str, str]:
    """Return the labels if nodes can have them."""
    if len(value) > _MAX_SELECTOR_KEYS:
        raise fail(f"has more than {_MAX_SELECTOR_KEYS} labels", "select by fewer")
    return labels(value)


def canaries(value: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Return the labels of a partition: there is at least one, and nodes can have them."""
    if value is not None and not value:
        raise fail("is empty", "name the label of the nodes that come first, or give nodes")
    return value if value is None else selector(value)


def term_key(value: str) -> str:
    """Return the key of an expression if a label may have it."""
    if not _is_key(value):
        raise fail(f"{_shown(value)} is no label's key", _KEY_RULE)
    return value


def term_values(value: object) -> object:
    """Refuse a list of more values than the schema takes; its items are checked after."""
    if isinstance(value, list) and len(value) > _MAX_VALUES:
        raise fail(f"has more than {_MAX_VALUES} values", "select by fewer")
    return tuple(value) if isinstance(value, list) else value


def term_value(value: str) -> str:
    """Return the value of an expression if a label may have it."""
    if len(value) > _MAX_LABEL_CHARS or _VALUE.fullmatch(value) is None:
        raise fail(f"{_shown(value)} is no label's value", _VALUE_RULE)
    return value


def terms(value: object) -> object:
    """Refuse a list of terms, or of expressions, that is empty or too long."""
    if not isinstance(value, list):
        return value
    if not 1 <= len(value) <= _MAX_TERMS:
        raise fail(f"has {len(value)} items", f"give 1 to {_MAX_TERMS}")
    return tuple(value)


def labels(value: Mapping[str, str]) -> Mapping[str, str]:
    """Return the labels if Kubernetes takes them; an empty value is one."""
    for key, text in value.items():
        if not _is_key(key):
            raise fail(f"{_shown(key)} is no label's key", _KEY_RULE)
        if len(text or "") > _MAX_LABEL_CHARS or _VALUE.fullmatch(text or "") is None:
            raise fail(f"{_shown(text)} of {key} is no label's value", _VALUE_RULE)
    return value


def object_annotations(value: Mapping[str, str]) -> Mapping[str, str]:
    """Return the annotations if Kubernetes takes them: keys as of labels, 256 KiB in all."""
    for key in value:
        if not _is_key(key.lower()):
            raise fail(f"{_shown(key)} is no annotation's key", _KEY_RULE)
    total_bytes = sum(len(f"{key}{text or ''}".encode()) for key, text in value.items())
    if total_bytes > _MAX_ANNOTATION_BYTES:
        raise fail("are more than 256 KiB", "write less")
    return value


def taint_key(value: str) -> str:
    """Return the key if a taint of ours may have it."""
    if not _is_key(value):
        raise fail(f"{_shown(value)} is no taint's key", _KEY_RULE)
    if value.startswith(_OTHERS_TAINTS):
        raise fail(
            f"{_shown(value)} is one of Kubernetes' own taints, and would be taken off ready nodes",
            "write one such as example.com/host-memory",
        )
    if not any(word in value for word in OUR_TAINTS):
        raise fail(
            f"{_shown(value)} has neither {' nor '.join(OUR_TAINTS)} in it, and another program's "
            "taint would be taken off ready nodes",
            "write one such as example.com/host-memory",
        )
    return value


def _is_key(key: str) -> bool:
    prefix = key.rpartition("/")[0]
    return _KEY.fullmatch(key) is not None and len(prefix) <= _MAX_PREFIX_CHARS
