"""`hostprep size`: from a model as people have it to groups, slots and bytes, or to a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from hostprep.cli.options import options_of
from hostprep.cli.size_model import ModelFiles, find_model
from hostprep.cli.size_one import BATCH_SIZE, STEP_TOKENS, Request, Sized, request_of, size_one
from hostprep.cli.size_pool import check_pool_options, pools_yaml
from hostprep.cli.size_table import document_of, node_document, show_all, show_families, show_gpus
from hostprep.console import print_json, warn
from hostprep.errors import BadInputError
from hostprep.sizing.engines import ENGINES
from hostprep.sizing.groups import TOKENS_PER_BLOCK
from hostprep.sizing.pools import chosen_integration, engine_of

F = TypeVar("F", bound=Callable[..., Any])


def _number(
    name: str, default: int | None, text: str, field: str | None = None
) -> Callable[[F], F]:
    """Return the option of a limit; `field` names it where the option's name does not."""
    names = (name,) if field is None else (name, field)
    shown = default is not None
    return click.option(*names, type=int, default=default, show_default=shown, help=text)


_options = options_of(
    click.option(
        "--engine", type=click.Choice(sorted(ENGINES)), help="By this engine's own rules."
    ),
    _number(
        "--max-batch-size",
        None,
        f"Requests at once; if not given the engine's own, {BATCH_SIZE} without --engine.",
    ),
    _number("--max-seq-len", None, "Tokens of the longest request; the model's own if not given."),
    _number(
        "--max-num-tokens",
        None,
        f"Tokens of one step: how long a chunk of a prompt can be; if not given the engine's "
        f"own, {STEP_TOKENS} without --engine.",
    ),
    _number(
        "--tokens-per-block",
        None,
        f"Tokens of one block; if not given the engine's own, without --engine {TOKENS_PER_BLOCK}, "
        "or more where compressed caches need it.",
    ),
    _number("--beam-width", 1, "Sequences of one request."),
    _number("--speculative-tokens", 0, "Tokens drafted beyond each step's own."),
    _number("--tp", 1, "Tensor-parallel ranks.", "tensor_parallel"),
    _number("--pp", 1, "Pipeline-parallel ranks.", "pipeline_parallel"),
    _number("--typical-seq-len", None, "Tokens of a usual request: what spare memory is for."),
    click.option("--kv-dtype", default="auto", show_default=True, help="As fp8, or nvfp4."),
    click.option("--index-dtype", default="auto", show_default=True, help="Sparse attention's."),
    click.option("--state-dtype", default="auto", show_default=True, help="Recurrent states'."),
    click.option("--gpu", help="GPUs: h200x8, 96Gix4, or node for those of this one."),
    click.option("--weights", help="With --gpu: bytes of all weights; read or reckoned if not."),
    click.option("--gpu-memory-utilization", type=float, help="With --gpu: the engine's share."),
    click.option("--gpu-reserve", help="With --gpu: for activations and the like, on each GPU."),
    click.option("--gpu-memory", help="Instead of --gpu: for caches, on each GPU, such as 40Gi."),
    click.option("--host-memory", help="For caches, of each rank, such as 300Gi."),
    click.option("--host-tokens", type=int, help="Instead: tokens that each rank is to keep."),
    click.option("--name", help="With -o yaml: the pool's name; the model's if not given."),
    click.option("--backing", help="With -o yaml: kinds of pages, such as HugeTLB2Mi,Base."),
    click.option(
        "--regions", help="With -o yaml: regions on each node; as the engine attaches if not given."
    ),
    click.option(
        "--integration",
        help="How the engine attaches to host memory, by its name in `hostprep engines`.",
    ),
)


@click.command(short_help="Say what caches a model needs, on GPU and host.")
@click.argument("models", nargs=-1, metavar="MODEL...")
@_options
@click.option("--list", "is_list", is_flag=True, help="Show the models and GPUs that are known.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="For people, for programs, or a HostMemoryPool for prepare.",
)
def size(models: tuple[str, ...], output: str, is_list: bool, **options: Any) -> int:
    """Say what caches a model needs on each rank so that nothing waits for ever.

    \b
    MODEL is a folder with config.json, that file, a name in the local hub
    cache, or - for standard input. Nothing is downloaded.
      hostprep size meta-llama/Llama-3.1-8B --engine vllm --tp 2 --gpu h200x2
      hostprep size ./model --max-batch-size 64 --gpu-memory 40Gi
      hostprep size ./model --host-memory 150Gi -o yaml > pool.yaml
      hostprep prepare -f pool.yaml
    """
    if is_list:
        _show_list(models, output)
        return 0
    if not models:
        raise BadInputError(
            "no model is named", remedy="give a folder with config.json; --list shows what is known"
        )
    if models.count("-") > 1:
        raise BadInputError("- is given twice", remedy="standard input holds one model")
    pool = {key: options[key] for key in ("name", "backing", "regions", "integration")}
    check_pool_options(len(models), output, pool)
    integration = chosen_integration(options["engine"], options["integration"])
    options["engine"] = options["engine"] or engine_of(integration)
    pool["integration"] = options["integration"] = integration
    request = request_of(options)
    is_one = len(models) == 1
    if output == "yaml":
        click.echo(
            pools_yaml([_size(text, request, is_one=is_one) for text in models], pool), nl=False
        )
        return 0
    sized, refused = _size_all(models, request)
    if output == "json":
        print_json(
            {
                "models": [document_of(one) for one in sized],
                "node": node_document(sized),
                "refused": [error.to_json() for error in refused],
            }
        )
    else:
        show_all(sized, request.gpus)
    for error in refused:
        warn(str(error))
    return BadInputError.exit_code if refused else 0


def _show_list(models: Sequence[str], output: str) -> None:
    if models or output != "table":
        raise BadInputError(
            "--list shows all that is known", remedy="leave out --output and the models"
        )
    show_families()
    show_gpus()


def _size_all(models: Sequence[str], request: Request) -> tuple[list[Sized], list[BadInputError]]:
    """Return what could be sized, and why the others could not. Raises it where there is one."""
    sized: list[Sized] = []
    refused: list[BadInputError] = []
    for text in models:
        try:
            sized.append(_size(text, request, is_one=len(models) == 1))
        except BadInputError as error:
            if len(models) == 1:
                raise
            refused.append(error)
    return sized, refused


def _size(text: str, request: Request, *, is_one: bool) -> Sized:
    """Size one model. Messages name its file, but for limits that concern the only one."""
    files: ModelFiles | None = None
    try:
        files = find_model(text)
        return size_one(files, request)
    except BadInputError as error:
        source = text if files is None else files.source
        if is_one or error.message.startswith((f"{source}: ", f"cannot read {source}: ")):
            raise
        raise BadInputError(
            f"{source}: {error.message}", reason=error.reason, remedy=error.remedy
        ) from error
