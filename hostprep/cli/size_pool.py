"""`hostprep size -o yaml`: a HostMemoryPool for each model, cut as its engine attaches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from hostprep.api.names import API_VERSION, POOL_KIND
from hostprep.api.pool_resource import load_pools
from hostprep.api.pool_spec import DEFAULT_BACKINGS
from hostprep.backing import Backing
from hostprep.cli.size_one import Sized
from hostprep.cli.size_table import node_lines
from hostprep.errors import BadInputError
from hostprep.paths import check_pool_name
from hostprep.sizing.pools import shape_pool

_POOL_OPTIONS = {"spec.backings": "--backing", "spec.regions": "--regions"}
"""Fields of a pool whose values are the options' own: errors name the option."""


def check_pool_options(models: int, output: str, pool: dict[str, Any]) -> None:
    """Raise BadInputError for options of a pool where none, or more than one, is made."""
    given = next((key for key, value in pool.items() if value is not None), None)
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
    documents = [
        _pool_yaml(name, one, options, priority=count - index if count > 1 else None)
        for index, (name, one) in enumerate(zip(names, sized, strict=True))
    ]
    head = "".join(f"# {line}\n" for line in node_lines(sized)) if count > 1 else ""
    return head + "---\n".join(documents)


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
) -> str:
    shape = shape_pool(
        one.sizing,
        one.engine,
        one.memory,
        integration=options["integration"],
        backings=_backings(options["backing"]),
        regions=options["regions"],
    )
    spec: dict[str, Any] = {"regions": shape.regions}
    if options["backing"]:
        spec["backings"] = [backing.value for backing in shape.backings]
    if priority is not None:
        spec["priority"] = priority
    spec["sizing"] = shape.sizing
    document = {
        "apiVersion": API_VERSION,
        "kind": POOL_KIND,
        "metadata": {"name": name},
        "spec": spec,
    }
    text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=False)
    (read,) = load_pools(text, source="", options=_POOL_OPTIONS)
    said = shape.describe(name, read.region_bytes or 0)
    return "".join(f"# {line}\n" for line in said) + text


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
