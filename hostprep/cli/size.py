"""`hostprep size`: from a model's config.json to groups, slots and bytes, or to a pool."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click
import yaml

from hostprep.api.names import API_VERSION, POOL_KIND
from hostprep.api.pool_resource import load_pools
from hostprep.api.schema import pool_schema
from hostprep.api.slot_layout import round_up
from hostprep.cli.options import options_of
from hostprep.console import print_json, print_table, say, warn, wrapped
from hostprep.errors import BadInputError
from hostprep.layout import RECURRENT
from hostprep.paths import check_pool_name
from hostprep.sizing.config import MAX_CONFIG_BYTES, ModelConfig, TypeChoice, load_config
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import (
    LONGEST_TOKENS,
    MOST_TOKENS_PER_BLOCK,
    TOKENS_PER_BLOCK,
    GroupSlots,
    Limits,
    Tier,
)
from hostprep.sizing.model import Model
from hostprep.sizing.size import Memory, Sizing, size_model
from hostprep.units import format_bytes, parse_quantity

F = TypeVar("F", bound=Callable[..., Any])

_MAX_NAME_CHARS: int = pool_schema("spec.sizing.model")["maxLength"]
_COLUMNS = (
    "GROUP",
    "WINDOW",
    "LAYERS",
    "SLOT BYTES",
    "MIN SLOTS",
    "SLOTS",
    "BYTES",
    "SHARE",
    "REQUESTS",
)
_POOL_OPTIONS = {"spec.backings": "--backing", "spec.regions": "--regions"}
"""Fields of a pool whose values are the options' own: errors name the option."""


def _number(
    name: str, default: int | None, text: str, field: str | None = None
) -> Callable[[F], F]:
    """Return the option of a limit; `field` names it where the option's name does not."""
    names = (name,) if field is None else (name, field)
    shown = default is not None
    return click.option(*names, type=int, default=default, show_default=shown, help=text)


_options = options_of(
    click.option("--max-batch-size", type=int, required=True, help="Requests at once."),
    _number("--max-seq-len", None, "Tokens of the longest request; the model's own if not given."),
    _number("--max-num-tokens", 8192, "Tokens of one step: how long a chunk of a prompt can be."),
    _number(
        "--tokens-per-block",
        None,
        f"Tokens of one block; {TOKENS_PER_BLOCK}, or more where compressed caches need it.",
    ),
    _number("--beam-width", 1, "Sequences of one request."),
    _number("--speculative-tokens", 0, "Tokens drafted beyond each step's own."),
    _number("--tp", 1, "Tensor-parallel ranks.", "tensor_parallel"),
    _number("--pp", 1, "Pipeline-parallel ranks.", "pipeline_parallel"),
    _number("--typical-seq-len", None, "Tokens of a usual request: what spare memory is for."),
    click.option("--kv-dtype", default="auto", show_default=True, help="As fp8, or nvfp4."),
    click.option("--index-dtype", default="auto", show_default=True, help="Sparse attention's."),
    click.option("--state-dtype", default="auto", show_default=True, help="Recurrent states'."),
    click.option("--gpu-memory", help="For caches, on each GPU, such as 40Gi."),
    click.option("--host-memory", help="For caches, of each rank, such as 300Gi."),
    click.option("--host-tokens", type=int, help="Instead: tokens that each rank is to keep."),
    click.option("--name", help="With -o yaml: the pool's name; the model's if not given."),
    click.option("--backing", help="With -o yaml: kinds of pages, such as HugeTLB2Mi,Base."),
    click.option(
        "--regions", help="With -o yaml: regions on each node; one for each rank if not given."
    ),
)


@click.command(short_help="Say what caches a model needs, on GPU and host.")
@click.argument("configs", nargs=-1, required=True, metavar="MODEL_CONFIG...", type=Path)
@_options
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="For people, for programs, or a HostMemoryPool for prepare.",
)
def size(configs: tuple[Path, ...], output: str, **options: Any) -> int:
    """Say what caches a model needs on each rank so that nothing waits for ever.

    \b
    MODEL_CONFIG is a Hugging Face config.json.
      hostprep size config.json --max-batch-size 64 --gpu-memory 40Gi
      hostprep size config.json --max-batch-size 64 -o yaml > pool.yaml
      hostprep prepare -f pool.yaml
    """
    request = _request_of(options)
    pool = {key: options[key] for key in ("name", "backing", "regions")}
    _check_pool_options(configs, output, pool)
    if output == "yaml":
        sized = [_size_file(path, request, is_one=len(configs) == 1) for path in configs]
        names = _pool_names(sized, pool["name"])
        click.echo("---\n".join(_pool_yaml(*one, pool) for one in zip(names, sized, strict=True)))
        return 0
    sized, refused = _size_all(configs, request)
    if output == "json":
        models = [_sizing_document(one) for one in sized]
        print_json({"models": models, "refused": [error.to_json() for error in refused]})
    else:
        for index, one in enumerate(sized):
            if index:
                say("")
            _show(one)
    for error in refused:
        warn(str(error))
    return BadInputError.exit_code if refused else 0


def _check_pool_options(configs: Sequence[Path], output: str, pool: dict[str, Any]) -> None:
    given = next((key for key, value in pool.items() if value is not None), None)
    if given is not None and output != "yaml":
        raise BadInputError(f"--{given} is for a pool", remedy="give -o yaml with it")
    if pool["name"] is not None and len(configs) > 1:
        raise BadInputError("--name is for one model", remedy="leave it out, or name one config")


def _pool_names(sized: Sequence[Sizing], name: str | None) -> list[str]:
    if name is not None:
        return [check_pool_name(name, "--name")]
    names = [_label(one.model.name) for one in sized]
    if len(set(names)) < len(names):
        raise BadInputError("two models have one name", remedy="size them one at a time")
    return names


def _label(name: str) -> str:
    """Return a model's name as a pool can have it."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
    return check_pool_name(label or "kv", "--name")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The options that hold for every model."""

    limits: dict[str, Any]
    """By the names of Limits' fields; a model says those that are None."""
    choice: TypeChoice
    memory: Memory


def _request_of(options: dict[str, Any]) -> _Request:
    """Check what needs no model. Raises BadInputError naming the option."""
    request = _Request(
        limits={field.name: options[field.name] for field in fields(Limits)},
        choice=TypeChoice(
            kv=options["kv_dtype"], index=options["index_dtype"], state=options["state_dtype"]
        ),
        memory=Memory(
            gpu_bytes=_bytes("--gpu-memory", options["gpu_memory"]),
            host_bytes=_bytes("--host-memory", options["host_memory"]),
            host_tokens=_positive("--host-tokens", options["host_tokens"]),
        ),
    )
    by_default = {"max_seq_len": LONGEST_TOKENS, "tokens_per_block": TOKENS_PER_BLOCK}
    given = {name: limit for name, limit in request.limits.items() if limit is not None}
    Limits(**by_default | given)
    return request


def _size_all(
    configs: Sequence[Path], request: _Request
) -> tuple[list[Sizing], list[BadInputError]]:
    """Return what could be sized, and why the others could not. Raises it where there is one."""
    sized: list[Sizing] = []
    refused: list[BadInputError] = []
    for path in configs:
        try:
            sized.append(_size_file(path, request, is_one=len(configs) == 1))
        except BadInputError as error:
            if len(configs) == 1:
                raise
            refused.append(error)
    return sized, refused


def _size_file(path: Path, request: _Request, *, is_one: bool) -> Sizing:
    """Size one model. Messages name its file, but for limits that concern the only one."""
    source = str(path)
    try:
        config = load_config(_read(path), source=source)
        return _size_config(config, model_name(path), request)
    except BadInputError as error:
        if is_one or error.message.startswith((f"{source}: ", f"cannot read {source}: ")):
            raise
        raise BadInputError(
            f"{source}: {error.message}", reason=error.reason, remedy=error.remedy
        ) from error


def _size_config(config: ModelConfig, name: str, request: _Request) -> Sizing:
    limits = dict(request.limits)
    model = read_model(
        config, name=name, choice=request.choice, drafts=limits["speculative_tokens"]
    )
    if limits["max_seq_len"] is None:
        limits["max_seq_len"] = _longest(config)
    if limits["tokens_per_block"] is None:
        model, limits["tokens_per_block"] = _with_blocks(model)
    return size_model(model, Limits(**limits), request.memory)


def model_name(path: Path) -> str:
    """Return the file's name, or its folder's where every model's file has the same one.

    Links are not followed: in Hugging Face's cache they lead to a file that is named by its hash.
    """
    whole = Path(os.path.abspath(path))
    name = whole.parent.name if whole.stem == "config" and whole.parent.name else whole.stem
    return "".join(char if char.isprintable() else "?" for char in name)[:_MAX_NAME_CHARS]


def _longest(config: ModelConfig) -> int:
    """Return how long the model's own sequences can be. Raises BadInputError if it says nothing."""
    longest = "max_position_embeddings"
    if not config.has(longest):
        raise BadInputError(
            f"{config.source}: does not say how long a sequence can be ({longest} is missing)",
            remedy="give --max-seq-len",
        )
    return config.integer(longest)


def _with_blocks(model: Model) -> tuple[Model, int]:
    """Return a block's tokens: as usual, or so many more that compressed entries are whole in it.

    Where that is not as usual, with a note of it.
    """
    tokens = round_up(TOKENS_PER_BLOCK, model.block_multiple)
    if tokens == TOKENS_PER_BLOCK or tokens > MOST_TOKENS_PER_BLOCK:
        return model, TOKENS_PER_BLOCK
    note = (
        f"a block has {tokens} tokens and not {TOKENS_PER_BLOCK}, for up to {max(model.ratios)} of "
        "them become one entry; if the engine's blocks have another number, give --tokens-per-block"
    )
    return replace(model, notes=(*model.notes, note)), tokens


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise BadInputError(
            f"cannot read {path}: {error.strerror}", remedy="name a config.json"
        ) from error


def _bytes(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return parse_quantity(text)
    except BadInputError as error:
        raise BadInputError(f"{option}: {error.message}", remedy=error.remedy) from error


def _positive(option: str, number: int | None) -> int | None:
    if number is not None and not 1 <= number <= 1 << 50:
        raise BadInputError(f"{option}: is {number}", remedy="give 1 or more")
    return number


def _show(sizing: Sizing) -> None:
    """Print one model's tables."""
    limits = sizing.limits
    head = (
        f"{sizing.model.name} ({sizing.model.family}): {_requests(limits.max_batch_size)} of up to "
        f"{limits.max_seq_len} tokens, {limits.tokens_per_block} a block, each rank of "
        f"TP {limits.tensor_parallel} x PP {limits.pipeline_parallel}"
    )
    say(wrapped(head, begin="", then="  "))
    for note in sizing.notes:
        say(wrapped(note, begin="  note: ", then="    "))
    say(wrapped(_least(sizing), begin="", then="  "))
    host = "Host, the least of it" if sizing.host.groups == sizing.floor.groups else "Host"
    for name, tier in (("GPU", sizing.gpu), (host, sizing.host)):
        if tier is None:
            continue
        say(f"{name}:")
        rows = [_row(group, tier) for group in tier.groups]
        if tier.has_directory:
            rows.append(_directory_row(tier))
        print_table("", _COLUMNS, rows)
        first = tier.limiting
        say(
            f"  {format_bytes(tier.size_bytes)}; first to fill: {first.group.name}, with "
            f"{_requests(first.requests)} of {limits.typical} tokens"
        )


def _least(sizing: Sizing) -> str:
    """Say what happens with less than each of the two sizes; more is no promise of speed."""
    batch = sizing.limits.max_batch_size
    alone, together = _distinct_sizes(sizing.smallest.size_bytes, sizing.floor.size_bytes)
    longest = f"one request of {sizing.limits.max_seq_len} tokens may never end"
    if batch == 1:
        return f"Below {alone} {longest}"
    if alone == together:
        return (
            f"Below {alone} {longest}; from there on {batch} at once come to no standstill, though "
            "they may wait for one another"
        )
    return f"Below {alone} {longest}; below {together} {batch} at once can come to a standstill"


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _distinct_sizes(smaller: int, larger: int) -> tuple[str, str]:
    """Return both sizes as text; in whole MiB, rounded up, where they would read the same."""
    texts = format_bytes(smaller), format_bytes(larger)
    if smaller == larger or len({text.replace(".0 ", " ") for text in texts}) == 2:
        return texts
    return f"{-(-smaller >> 20)} MiB", f"{-(-larger >> 20)} MiB"


def _row(group: GroupSlots, tier: Tier) -> tuple[str, ...]:
    window = "state" if group.group.per_sequence else str(group.group.window or "none")
    return (
        group.group.name,
        window,
        str(group.group.layers),
        str(group.group.slot_bytes),
        str(group.min_slots),
        str(group.slots),
        format_bytes(group.size_bytes),
        f"{100 * tier.share(group):.1f} %",
        str(group.requests),
    )


def _directory_row(tier: Tier) -> tuple[str, ...]:
    """Say what the records of all slots take; no request waits for it."""
    size = format_bytes(tier.directory_bytes)
    return ("directory", "-", "-", "-", "-", str(tier.slots), size, "-", "-")


def _sizing_document(sizing: Sizing) -> dict[str, Any]:
    """Return one model's sizing for programs."""
    return {
        "model": sizing.model.name,
        "model_type": sizing.model.family,
        "limits": sizing.limits,
        "notes": sizing.notes,
        "smallest_bytes": sizing.smallest.size_bytes,
        "floor_bytes": sizing.floor.size_bytes,
        "gpu": sizing.gpu and _tier_document(sizing.gpu),
        "host": _tier_document(sizing.host),
        "layout": sizing.layout.to_json(),
    }


def _tier_document(tier: Tier) -> dict[str, Any]:
    return {
        "size_bytes": tier.size_bytes,
        "directory_bytes": tier.directory_bytes,
        "limiting_group": tier.limiting.group.name,
        "requests": tier.limiting.requests,
        "groups": [
            {
                "name": one.group.name,
                "window_tokens": one.group.window,
                "per_sequence": one.group.per_sequence,
                "layers": one.group.layers,
                "slot_bytes": one.group.slot_bytes,
                "min_slots": one.min_slots,
                "slots": one.slots,
                "size_bytes": one.size_bytes,
                "share": round(tier.share(one), 6),
                "slots_per_request": one.per_request,
                "requests": one.requests,
            }
            for one in tier.groups
        ],
    }


def _pool_yaml(name: str, sizing: Sizing, options: dict[str, str | None]) -> str:
    """Return a HostMemoryPool with that sizing, which `hostprep prepare -f` takes.

    Raises BadInputError where the options make none, with the field named.
    """
    regions = options["regions"] or _ranks(sizing)
    spec: dict[str, Any] = {"regions": int(regions) if str(regions).isdigit() else regions}
    if options["backing"]:
        spec["backings"] = [part.strip() for part in options["backing"].split(",")]
    spec["sizing"] = _sizing_spec(sizing)
    document = {
        "apiVersion": API_VERSION,
        "kind": POOL_KIND,
        "metadata": {"name": name},
        "spec": spec,
    }
    text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=False)
    load_pools(text, source="", options=_POOL_OPTIONS)
    return text


def _ranks(sizing: Sizing) -> int:
    return sizing.limits.tensor_parallel * sizing.limits.pipeline_parallel


def _sizing_spec(sizing: Sizing) -> dict[str, Any]:
    layout = sizing.layout
    groups = []
    for group, least in zip(layout.layout.groups, layout.min_slots, strict=True):
        shown: dict[str, Any] = {"name": group.name}
        if group.kind == RECURRENT:
            shown["kind"] = "Recurrent"
        if group.window_tokens is not None:
            shown["windowTokens"] = group.window_tokens
        shown |= {"slotBytes": group.slot_bytes, "minSlots": least, "slots": group.slots}
        groups.append(shown)
    return {
        "model": layout.model,
        "tokensPerBlock": layout.layout.tokens_per_block,
        "directory": layout.has_directory,
        "groups": groups,
    }
