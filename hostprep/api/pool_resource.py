"""The HostMemoryPool resource, from YAML or from options, checked and made a PoolSpec."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hostprep.api.names import API_VERSION, POOL_KIND
from hostprep.api.pool_model import PolicyModel, PoolResource, Sizing, StoredPolicyModel
from hostprep.api.pool_spec import PoolSpec, PoolState, RegionLayout
from hostprep.api.schema import Loader
from hostprep.api.slot_layout import SlotLayout
from hostprep.api.versions import SERVED_API_VERSIONS, WRITTEN_API_VERSION, respelled
from hostprep.errors import BadInputError
from hostprep.layout import Group
from hostprep.paths import check_pool_name

if TYPE_CHECKING:
    from yaml.nodes import MappingNode

MAX_TEXT_BYTES = 1 << 20
_MAX_DEPTH = 32
_MAX_PLAIN_CHARS = 1024  # far more than any number; printing an endless one is refused by Python
_QUOTED = ("'", '"', "|", ">")
_SHOWN_CHARS = 40
_WHOLE = "the document"
"""The path of an error that no field is to blame for."""
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "string": "text (put it in quotes)",
    "bool": "true or false",
    "dict": "a mapping",
    "model": "a mapping",
    "tuple": "a list",
    "list": "a list",
}
_OPTIONS = {
    "metadata.name": "--name",
    "spec.size": "--size",
    "spec.percent": "--size",
    "spec.backings": "--backing",
    "spec.regions": "--regions",
    "spec.reserve": "--reserve",
    "spec.access.gid": "--gid",
    "spec.access.mode": "--mode",
    "spec.priority": "--priority",
}


def load_pools(text: str, *, source: str, options: Mapping[str, str] = {}) -> tuple[PoolSpec, ...]:
    """Read one or several YAML documents, each a HostMemoryPool.

    `source` names the text in messages (a file's name); empty for one that nobody sees. `options`:
    what fields were made of, by their paths, to be named instead of them.
    Raises BadInputError for text of more than 1 MiB, text that is no YAML, aliases, nesting deeper
    than 32, anything that is not a valid HostMemoryPool, two pools of one name, and no pool at all.
    """
    if len(text) > MAX_TEXT_BYTES or len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise BadInputError(f"{source}: is larger than 1 MiB", remedy="split it into several files")
    documents = [document for document in _documents(text, source) if document is not None]
    if not documents:
        raise BadInputError(
            f"{source}: holds no {POOL_KIND}",
            remedy=f"start it with apiVersion: {WRITTEN_API_VERSION}",
        )
    specs: list[PoolSpec] = []
    for number, document in enumerate(documents, start=1):
        where = source if len(documents) == 1 else f"{source}: document {number}"
        specs.append(_spec_of(document, where, options))
        if specs[-1].name in {spec.name for spec in specs[:-1]}:
            raise BadInputError(
                f"{where}: metadata.name: a pool {specs[-1].name!r} stands there already",
                remedy="give each pool a name of its own",
            )
    return tuple(specs)


def spec_from_options(
    *,
    name: str,
    size: str | None = None,
    backings: str | None = None,
    regions: str | int = RegionLayout.PER_NUMA_NODE.value,
    reserve: str | None = None,
    gid: int | None = None,
    mode: str | None = None,
    priority: int = 0,
) -> PoolSpec:
    """Return the spec that the command line's options describe.

    `size` is a quantity such as 8Gi or a share of the memory of NUMA nodes with CPUs, in whole
    percent such as 50%; `backings`
    are names in order, with commas between. Raises BadInputError naming the option.
    """
    if isinstance(regions, str) and regions.isascii() and regions.isdigit() and len(regions) < 10:
        regions = int(regions)
    spec: dict[str, object] = {"priority": priority, "regions": regions}
    if size is not None and size.strip().endswith("%"):
        spec["percent"] = _percent(size)
    elif size is not None:
        spec["size"] = size
    if backings is not None:
        spec["backings"] = [backing.strip() for backing in backings.split(",")]
    if reserve is not None:
        spec["reserve"] = reserve
    access = {"gid": gid, "mode": mode}
    spec["access"] = {key: value for key, value in access.items() if value is not None}
    document = {
        "apiVersion": WRITTEN_API_VERSION,
        "kind": POOL_KIND,
        "metadata": {"name": name},
        "spec": spec,
    }
    return _spec_of(document, "command line", options=_OPTIONS)


def spec_from_policy(
    name: str, uid: str, policy: Mapping[str, object], absent: bool = False
) -> PoolSpec:
    """Return the spec that one item of a HostMemoryNode's `spec.pools` asks for.

    `policy` holds a pool's own fields, already resolved by the API server; what is not known is
    ignored, since the operator may be newer than the agent, and what an earlier version stored is
    taken: old spellings and a fractional percent. An absent pool needs none of it.
    Raises BadInputError naming the field.
    """
    where = f"spec.pools[{name[:63]}]"
    check_pool_name(name, f"{where}.name")
    if absent:
        return PoolSpec(name=name, uid=uid, state=PoolState.ABSENT, size_bytes=1)
    try:
        model = StoredPolicyModel.model_validate(respelled(policy), extra="ignore")
    except ValidationError as error:
        path, why, remedy = _explain(error)
        shown = f"{where}.policy" if path == _WHOLE else f"{where}.policy.{path}"
        raise BadInputError(f"{shown}: {why}", remedy=remedy) from error
    return _node_half(name, uid, model)


def _percent(size: str) -> int:
    digits = size.strip()[:-1]
    if digits.isascii() and digits.isdigit() and len(digits) < 10:
        return int(digits)
    raise BadInputError(
        f"command line: --size: {size[:40]!r} is not a share in whole percent",
        remedy="write it like 50%, or as a quantity like 96Gi",
    )


def _spec_of(document: object, where: str, options: Mapping[str, str]) -> PoolSpec:
    if not isinstance(document, dict):
        raise BadInputError(f"{where}: is no mapping", remedy=f"write a {POOL_KIND}")
    _check_identity(document, where)
    try:
        resource = PoolResource.model_validate(_in_written_version(document))
    except ValidationError as error:
        path, why, remedy = _explain(error)
        shown = _shown_path(path, options)
        raise BadInputError(f"{_at(where, shown)}: {why}", remedy=remedy) from error
    name_field = _at(where, _shown_path("metadata.name", options))
    name = check_pool_name(resource.metadata.name, name_field)
    return _node_half(name, resource.metadata.uid or "", resource.spec)


def _at(where: str, field: str) -> str:
    return f"{where}: {field}" if where else field


def _shown_path(path: str, options: Mapping[str, str]) -> str:
    for field, option in options.items():
        if path == field or path.startswith((field + ".", field + "[")):
            return option
    if path == "spec":
        return options.get("spec.size", path)
    return path


def _check_identity(document: Mapping[Any, Any], where: str) -> None:
    """Say first that it is another kind of object: its fields would only confuse."""
    for field, taken in (("apiVersion", SERVED_API_VERSIONS), ("kind", (POOL_KIND,))):
        if document.get(field) not in taken:
            shown = repr(document[field])[:60] if field in document else "nothing"
            remedy = f"write {field}: {taken[0]}"
            raise BadInputError(f"{where}: {field}: is {shown}", remedy=remedy)


def _in_written_version(document: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a document of v1alpha1 with the spellings of v1beta1; another one as it is."""
    spec = document.get("spec")
    if document.get("apiVersion") == API_VERSION and isinstance(spec, dict):
        return {**document, "spec": respelled(spec)}
    return document


def _slot_layout(sizing: Sizing) -> SlotLayout:
    return SlotLayout.of(
        [
            Group(
                name=group.name,
                slot_bytes=group.slot_bytes,
                slots=group.slots,
                window_tokens=group.window_tokens,
                kind=group.kind.lower(),
            )
            for group in sizing.groups
        ],
        tokens_per_block=sizing.tokens_per_block,
        min_slots=[group.min_slots for group in sizing.groups],
        model=sizing.model or "",
        has_directory=sizing.directory or False,
        integration=sizing.integration or "",
        regions_per_engine=sizing.regions_per_engine,
        least_bytes=sizing.region_bytes or 0,
    )


def _node_half(name: str, uid: str, policy: PolicyModel) -> PoolSpec:
    by_count = isinstance(policy.regions, int)
    return PoolSpec(
        name=name,
        uid=uid,
        size_bytes=policy.size,
        percent=policy.percent,
        region_size_bytes=policy.region_size,
        sizing=_slot_layout(policy.sizing) if policy.sizing else None,
        priority=policy.priority,
        backings=policy.backings,
        layout=RegionLayout.COUNT if by_count else RegionLayout(str(policy.regions)),
        region_count=int(policy.regions) if by_count else None,
        reserve_bytes=policy.reserve,
        gid=policy.access.gid,
        mode=policy.access.mode,
        max_kept_s=policy.retention.max_age_seconds if policy.retention else None,
    )


# --- YAML


class _StrictLoader(Loader):  # type: ignore[misc,valid-type]
    """Plain values only, and no key twice: PyYAML would silently keep the last one."""

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return the mapping. Raises ConstructorError for a key that stands there twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands there twice", key.start_mark
                )
            if isinstance(key.value, str):
                seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _documents(text: str, source: str) -> Iterator[object]:
    try:
        _refuse_bombs(text, source)
        yield from yaml.load_all(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}: line {mark.line + 1}" if mark else source
        raise _no_yaml(where, error.problem or "cannot be read") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise _no_yaml(source, str(error)) from error


def _no_yaml(where: str, why: str) -> BadInputError:
    line = " ".join(why.split())[:200]
    return BadInputError(f"{where}: is not YAML that can be used: {line}", remedy="correct it")


def _refuse_bombs(text: str, source: str) -> None:
    """Refuse aliases (a few bytes may stand for gigabytes) and nesting that breaks recursion."""
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        line = event.start_mark.line + 1 if event.start_mark else 1
        if isinstance(event, yaml.AliasEvent):
            raise BadInputError(
                f"{source}: line {line}: aliases (such as *name) are not accepted",
                remedy="write the value out",
            )
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > _MAX_PLAIN_CHARS:
            if event.tag is not None or event.style not in _QUOTED:
                raise BadInputError(
                    f"{source}: line {line}: holds a value of {len(event.value)} characters",
                    remedy="put long text in quotes",
                )
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > _MAX_DEPTH:
            raise BadInputError(
                f"{source}: line {line}: is nested deeper than {_MAX_DEPTH}",
                remedy=f"no {POOL_KIND} needs that",
            )


# --- what is wrong, in words


def _explain(error: ValidationError) -> tuple[str, str, str]:
    """Return the first error as (field path, what is wrong, remedy).

    The path is written as in `kubectl explain`, such as spec.access.mode or spec.backings[1].
    """
    first = error.errors(include_url=False)[0]
    within = first.get("ctx", {}).get("field") or ""
    location = (*first["loc"], within) if within else first["loc"]
    return _path(location), *_words(first)


def _words(error: ErrorDetails) -> tuple[str, str]:
    """Return what is wrong, and the remedy."""
    kind = error["type"]
    if kind == "hostprep":
        return str(error["ctx"]["why"]), str(error["ctx"]["remedy"])
    fixed = {
        "missing": ("is missing", "add it"),
        "extra_forbidden": ("is no field that exists", _known_fields(error["loc"])),
        "invalid_key": (f"{_shown_error(error)} is no name of a field", "write it as text"),
    }
    if kind in fixed:
        return fixed[kind]
    if kind == "literal_error":
        return f"{_shown_error(error)} is not allowed", f"write {error['ctx']['expected']}"
    for prefix, words in _TYPES.items():
        if kind.startswith((f"{prefix}_type", f"{prefix}_parsing", f"{prefix}_from")):
            return f"{_shown_error(error)} is not {words}", f"write {words}"
    return f"{_shown_error(error)} is out of range", _plain(error["msg"])


def _plain(message: str) -> str:
    return message.replace("Input should be", "it must be").replace("String should", "it should")


def _shown_error(error: ErrorDetails) -> str:
    text = " ".join(repr(error["input"])[: 2 * _SHOWN_CHARS].split())
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not step.startswith("constrained-") and step not in ("int", "str", "[key]"):
            shown = " ".join(step.split())[:_SHOWN_CHARS]
            path += f".{shown}" if path else shown
    return path or _WHOLE


def _known_fields(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] | None = PoolResource
    for step in location[:-1]:
        if isinstance(step, str):
            model = _model_of(model, step)
    if model is None:
        return "remove it"
    fields = [field.alias or name for name, field in model.model_fields.items()]
    close = difflib.get_close_matches(str(location[-1]), fields, n=1)
    return f"did you mean {close[0]}?" if close else "choose from " + ", ".join(fields)


def _model_of(model: type[BaseModel] | None, field: str) -> type[BaseModel] | None:
    fields = model.model_fields.values() if model else ()
    return _model_in(next((known.annotation for known in fields if known.alias == field), None))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field's values, one by one where they are a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
