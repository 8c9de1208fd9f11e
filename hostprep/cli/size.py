"""`hostprep size`: from a model's config.json to groups, slots and bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from hostprep.cli.size_models import all_that_can_be, asked_for, size_file
from hostprep.cli.size_output import pool_yaml, sizing_document, tables
from hostprep.console import error_document, print_json, print_table, say, warn
from hostprep.errors import BadInputError
from hostprep.paths import check_pool_name
from hostprep.sizing.groups import TOKENS_PER_BLOCK
from hostprep.sizing.size import Sizing

__all__ = ["size"]

F = TypeVar("F", bound=Callable[..., Any])


def _number(name: str, default: int | None, text: str, **more: Any) -> Callable[[F], F]:
    shown = default is not None
    return click.option(name, type=int, default=default, show_default=shown, help=text, **more)


_LIMITS = (
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
      hostprep size config.json --max-batch-size 64 --gpu-memory 40Gi --host-memory 300Gi
      hostprep size config.json --max-batch-size 64 --host-memory 300Gi -o yaml > pool.yaml
      hostprep prepare -f pool.yaml
    """
    asked = asked_for(options)
    pool = {key: options[key] for key in ("name", "backing", "regions")}
    _check_pool_options(configs, output, pool)
    if output == "yaml":
        sized = [size_file(path, asked, is_one=len(configs) == 1) for path in configs]
        names = _pool_names(sized, pool["name"])
        click.echo("---\n".join(pool_yaml(*one, pool) for one in zip(names, sized, strict=True)))
        return 0
    sized, refused = all_that_can_be(configs, asked)
    if output == "json":
        models = [sizing_document(one) for one in sized]
        print_json({"models": models, "refused": [error_document(one) for one in refused]})
    else:
        _show(sized)
    for error in refused:
        warn(str(error))
    return BadInputError.exit_code if refused else 0


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
