"""What `hostprep size` makes of its options and each config.json, and of what cannot be sized."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hostprep.api.schema import pool_schema
from hostprep.api.slot_layout import round_up
from hostprep.errors import BadInputError
from hostprep.sizing.config import MAX_CONFIG_BYTES, ModelConfig, TypeChoice, load_config
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import LONGEST_TOKENS, MOST_TOKENS_PER_BLOCK, TOKENS_PER_BLOCK, Limits
from hostprep.sizing.model import Model
from hostprep.sizing.size import Memory, Sizing, size_model
from hostprep.units import parse_quantity

__all__ = ["Asked", "all_that_can_be", "asked_for", "model_name", "size_file"]

_MAX_NAME_CHARS: int = pool_schema("spec.sizing.model")["maxLength"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is the same for every model."""

    options: dict[str, Any]
    choice: TypeChoice
    memory: Memory


def asked_for(options: dict[str, Any]) -> Asked:
    """Check what needs no model. Raises BadInputError naming the option."""
    asked = Asked(
        options=options,
        choice=TypeChoice(
            kv=options["kv_dtype"], index=options["index_dtype"], state=options["state_dtype"]
        ),
        memory=Memory(
            gpu_bytes=_bytes("--gpu-memory", options["gpu_memory"]),
            host_bytes=_bytes("--host-memory", options["host_memory"]),
            host_tokens=_positive("--host-tokens", options["host_tokens"]),
        ),
    )
    longest, tokens = options["max_seq_len"], options["tokens_per_block"]
    _limits(
        options,
        max_seq_len=LONGEST_TOKENS if longest is None else longest,
        tokens_per_block=TOKENS_PER_BLOCK if tokens is None else tokens,
    )
    return asked


def all_that_can_be(
    configs: Sequence[Path], asked: Asked
) -> tuple[list[Sizing], list[BadInputError]]:
    """Return what could be sized, and why the others could not. Raises it where there is one."""
    sized: list[Sizing] = []
    refused: list[BadInputError] = []
    for path in configs:
        try:
            sized.append(size_file(path, asked, is_one=len(configs) == 1))
        except BadInputError as error:
            if len(configs) == 1:
                raise
            refused.append(error)
    return sized, refused


def size_file(path: Path, asked: Asked, *, is_one: bool) -> Sizing:
    """Size one model. Messages name its file, but for limits that concern the only one."""
    source = str(path)
    try:
        config = load_config(_read(path), source=source)
        return _sized_config(config, model_name(path), asked)
    except BadInputError as error:
        if is_one or error.message.startswith((f"{source}: ", f"cannot read {source}: ")):
            raise
        raise BadInputError(
            f"{source}: {error.message}", reason=error.reason, remedy=error.remedy
        ) from error


def _sized_config(config: ModelConfig, name: str, asked: Asked) -> Sizing:
    options = asked.options
    drafts = options["speculative_tokens"]
    model = read_model(config, name=name, choice=asked.choice, drafts=drafts)
    longest, tokens = options["max_seq_len"], options["tokens_per_block"]
    if longest is None:
        longest = _longest(config)
    if tokens is None:
        model, tokens = _with_blocks(model)
    limits = _limits(options, max_seq_len=longest, tokens_per_block=tokens)
    return size_model(model, limits, asked.memory)


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


def _limits(options: dict[str, Any], *, max_seq_len: int, tokens_per_block: int) -> Limits:
    return Limits(
        max_batch_size=options["max_batch_size"],
        max_seq_len=max_seq_len,
        max_num_tokens=options["max_num_tokens"],
        tokens_per_block=tokens_per_block,
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
