"""`hostprep size`: from a model's config.json to groups, slots and bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from hostprep.cli.output import print_json, print_table, say
from hostprep.cli.size_output import pool_yaml, sizing_document, tables
from hostprep.errors import BadInputError
from hostprep.paths import check_pool_name
from hostprep.sizing.cache_types import TypeChoice
from hostprep.sizing.config import MAX_CONFIG_BYTES, ModelConfig, load_config
from hostprep.sizing.families import read_model
from hostprep.sizing.limits import Limits
from hostprep.sizing.size import Memory, Sizing, size_model
from hostprep.units import parse_quantity

__all__ = ["size"]

F = TypeVar("F", bound=Callable[..., Any])


def _number(name: str, default: int | None, text: str, **more: Any) -> Callable[[F], F]:
    shown = default is not None
    return click.option(name, type=int, default=default, show_default=shown, help=text, **more)


_LIMITS = (
    click.option("--max-batch-size", type=int, required=True, help="Requests at once."),
    _number("--max-seq-len", None, "Tokens of the longest request; the model's own if not given."),
    _number("--max-num-tokens", 8192, "Tokens of one step: how long a chunk of a prompt can be."),
    _number("--tokens-per-block", 32, "Tokens of one block."),
    _number("--beam-width", 1, "Sequences of one request."),
    _number("--speculative-tokens", 0, "Tokens drafted beyond each step's own."),
    _number("--tp", 1, "Tensor-parallel ranks."),
    _number("--pp", 1, "Pipeline-parallel ranks."),
    _number("--typical-seq-len", None, "Tokens of a usual request: what spare memory is for."),
)
_TYPES = (
    click.option("--kv-dtype", default="auto", show_default=True, help="As fp8, or nvfp4."),
    click.option("--index-dtype", default="auto", show_default=True, help="Sparse attention's."),
    click.option("--state-dtype", default="auto", show_default=True, help="Recurrent states'."),
)
_MEMORY = (
    click.option("--gpu-memory", help="For caches, on each GPU, such as 40Gi."),
    click.option("--host-memory", help="For caches, of each rank, such as 300Gi."),
    click.option("--host-tokens", type=int, help="Instead: tokens that each rank is to keep."),
)
_POOL = (
    click.option("--name", help="With -o yaml: the pool's name; the model's if not given."),
    click.option("--backing", help="With -o yaml: kinds of pages, such as HugeTLB2Mi,Base."),
    click.option(
        "--regions", help="With -o yaml: regions on each node; one for each rank if not given."
    ),
)


def _options(command: F) -> F:
    for option in reversed((*_LIMITS, *_TYPES, *_MEMORY, *_POOL)):
        command = option(command)
    return command


@click.command()
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
def size(configs: tuple[Path, ...], output: str, **options: Any) -> None:
    """Say what caches a model needs on each rank so that nothing waits for ever.

    \b
    MODEL_CONFIG is a Hugging Face config.json.
      hostprep size config.json --max-batch-size 64 --gpu-memory 40Gi --host-memory 300Gi
      hostprep size config.json --max-batch-size 64 --host-memory 300Gi -o yaml > pool.yaml
      hostprep prepare -f pool.yaml
    """
    memory = Memory(
        gpu_bytes=_bytes("--gpu-memory", options["gpu_memory"]),
        host_bytes=_bytes("--host-memory", options["host_memory"]),
        host_tokens=_positive("--host-tokens", options["host_tokens"]),
    )
    pool = {key: options[key] for key in ("name", "backing", "regions")}
    _check_pool_options(configs, output, pool)
    sized = [_sized(path, options, memory) for path in configs]
    if output == "json":
        print_json({"models": [sizing_document(one) for one in sized]})
    elif output == "yaml":
        names = _pool_names(sized, pool["name"])
        click.echo("---\n".join(pool_yaml(*one, pool) for one in zip(names, sized, strict=True)))
    else:
        _show(sized)


def _show(sized: Sequence[Sizing]) -> None:
    for index, one in enumerate(sized):
        if index:
            say("")
        for table in tables(one):
            for line in table.before:
                say(line)
            print_table("", table.columns, table.rows)
            for line in table.after:
                say(line)


def _sized(path: Path, options: dict[str, Any], memory: Memory) -> Sizing:
    config = load_config(_read(path), source=str(path))
    choice = TypeChoice(
        kv=options["kv_dtype"], index=options["index_dtype"], state=options["state_dtype"]
    )
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    limits = _limits(options, config)
    drafts = limits.speculative_tokens
    model = read_model(config, name=name, choice=choice, drafts=drafts)
    return size_model(model, limits, memory)


def _limits(options: dict[str, Any], config: ModelConfig) -> Limits:
    longest = options["max_seq_len"]
    if longest is None:
        if not config.has("max_position_embeddings"):
            raise BadInputError(
                f"--max-seq-len: {config.source} does not say how long a sequence can be",
                remedy="give it",
            )
        longest = config.integer("max_position_embeddings")
    return Limits(
        max_batch_size=options["max_batch_size"],
        max_seq_len=longest,
        max_num_tokens=options["max_num_tokens"],
        tokens_per_block=options["tokens_per_block"],
        beam_width=options["beam_width"],
        speculative_tokens=options["speculative_tokens"],
        tensor_parallel=options["tp"],
        pipeline_parallel=options["pp"],
        typical_seq_len=options["typical_seq_len"],
    )


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


def _check_pool_options(configs: Sequence[Path], output: str, pool: dict[str, Any]) -> None:
    given = next((key for key, value in pool.items() if value is not None), None)
    if given is not None and output != "yaml":
        raise BadInputError(f"--{given} is for a pool", remedy="give -o yaml with it")
    if pool["name"] is not None and len(configs) > 1:
        raise BadInputError("--name is for one model", remedy="leave it out, or name one config")


def _pool_names(sized: Sequence[Sizing], name: str | None) -> list[str]:
    if name is not None:
        return [check_pool_name(name)]
    names = [_label(one.model.name) for one in sized]
    if len(set(names)) < len(names):
        raise BadInputError("two models have one name", remedy="size them one at a time")
    return names


def _label(name: str) -> str:
    """Return a model's name as a pool can have it."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
    return check_pool_name(label or "kv")
