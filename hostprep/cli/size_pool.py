"""`hostprep size -o yaml`: a HostMemoryPool for each model, cut as its engine attaches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from hostprep.api.names import POOL_KIND
from hostprep.api.pool_resource import load_pools
from hostprep.api.pool_spec import DEFAULT_BACKINGS
from hostprep.api.versions import WRITTEN_API_VERSION
from hostprep.backing import Backing
from hostprep.cli.size_one import Sized
from hostprep.errors import BadInputError
from hostprep.paths import check_pool_name
from hostprep.sizing.pools import shape_pool
from hostprep.units import format_bytes

_POOL_OPTIONS = {"spec.backings": "--backing", "spec.regions": "--regions"}
"""Fields of a pool whose values are the options' own: errors name the option."""

_OF_A_POOL = ("name", "backing", "regions")
"""Options that say nothing of a model, or of what it needs."""


def check_pool_options(models: int, output: str, pool: dict[str, Any]) -> None:
    """Raise BadInputError for options of a pool where none, or more than one, is made."""
    given = next((key for key in _OF_A_POOL if pool[key] is not None), None)
    if given is not None and output != "yaml":
        raise BadInputError(f"--{given} is for a pool", remedy="give -o yaml with it")
    if pool["name"] is not None and models > 1:
        raise BadInputError("--name is for one model", remedy="leave it out, or name one model")


def pools_yaml(sized: Sequence[Sized], options: dict[str, str | None]) -> str:
    """Return a pool for each model, which `hostprep prepare -f` takes.

    Several get priorities in their order: where the node has too little for all of them, the first
    ones get theirs. Raises BadInputError where the options make no pool, with the field named.
    """
    names = _pool_names(sized, options["name"])
    count = len(sized)
    pools = [
        _pool_yaml(name, one, options, priority=count - index if count > 1 else None)
        for index, (name, one) in enumerate(zip(names, sized, strict=True))
    ]
    head = ""
    if count > 1 and all(size_bytes for _, size_bytes in pools):
        sizes = ", ".join(
            f"{name} {format_bytes(size_bytes)}"
            for name, (_, size_bytes) in zip(names, pools, strict=True)
        )
        total = format_bytes(sum(size_bytes for _, size_bytes in pools))
        head = f"# Host memory of each node: {total} ({sizes})\n"
    return head + "---\n".join(text for text, _ in pools)


def _pool_names(sized: Sequence[Sized], name: str | None) -> list[str]:
    if name is not None:
        return [check_pool_name(name, "--name")]
    names = [_label(one.sizing.model.name) for one in sized]
    if len(set(names)) < len(names):
        raise BadInputError("two models have one name", remedy="size them one at a time")
    return names


def _label(name: str) -> str:
    """Return a model's name as a pool can have it."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
    return check_pool_name(label or "kv", "--name")


def _pool_yaml(
    name: str, one: Sized, options: dict[str, str | None], *, priority: int | None
) -> tuple[str, int]:
    """Return a pool and its bytes on each node; 0 where each node's GPUs say how many regions."""
    shape = shape_pool(
        one.sizing,
        one.engine,
        one.memory,
        integration=options["integration"] or "",
        backings=_backings(options["backing"]),
        regions=options["regions"],
    )
    spec: dict[str, Any] = {
        "nodeSelector": {f"pool.hostprep.dev/{name}": "true"},
        "regions": shape.regions,
    }
    if options["backing"]:
        spec["backings"] = [backing.value for backing in shape.backings]
    if priority is not None:
        spec["priority"] = priority
    spec["sizing"] = shape.sizing
    document = {
        "apiVersion": WRITTEN_API_VERSION,
        "kind": POOL_KIND,
        "metadata": {"name": name},
        "spec": spec,
    }
    text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=False)
    (read,) = load_pools(text, source="", options=_POOL_OPTIONS)
    said = shape.describe(name, read.region_bytes or 0)
    regions = 1 if shape.regions == "Single" else shape.regions
    size_bytes = regions * (read.region_bytes or 0) if isinstance(regions, int) else 0
    return "".join(f"# {line}\n" for line in said) + text, size_bytes


def _backings(text: str | None) -> tuple[Backing, ...]:
    """Return the kinds of pages that are allowed. Raises BadInputError naming the option."""
    if text is None:
        return DEFAULT_BACKINGS
    known = {backing.value: backing for backing in Backing}
    found = []
    for part in text.split(","):
        if part.strip() not in known:
            raise BadInputError(
                f"--backing: there is no backing {part.strip()[:40]!r}",
                remedy=f"choose from {', '.join(known)}",
            )
        found.append(known[part.strip()])
    return tuple(found)
