"""One model of `hostprep size`: from its files and the options to a sizing."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from typing import Any

from hostprep.api.slot_layout import round_up
from hostprep.cli.size_gpu import check_memory, check_ranks, find_gpus, find_weights
from hostprep.cli.size_model import ModelFiles
from hostprep.errors import BadInputError
from hostprep.sizing.config import ModelConfig, load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.engines import rules_of
from hostprep.sizing.engines.rules import (
    DEFAULT_DEVICE,
    Device,
    EngineDefaults,
    EngineRules,
    EngineSizing,
)
from hostprep.sizing.engines.starting import ALLOW_LONGER, check_starts
from hostprep.sizing.families import read_model
from hostprep.sizing.gpus import GpuBudget, Gpus, default_reserve_bytes
from hostprep.sizing.groups import (
    LONGEST_TOKENS,
    MOST_TOKENS_PER_BLOCK,
    TOKENS_PER_BLOCK,
    Limits,
)
from hostprep.sizing.model import Model
from hostprep.sizing.size import Memory, Sizing, size_model
from hostprep.units import format_bytes, parse_quantity

BATCH_SIZE = 64
"""Requests at once where neither --max-batch-size nor --engine says."""
STEP_TOKENS = 8192
UTILIZATION = 0.9
"""Where no --engine says: what engines took by default for years."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options that hold for every model."""

    limits: dict[str, Any]
    """By the names of Limits' fields; a model says those that are None."""
    choice: TypeChoice
    memory: Memory
    engine: str | None = None
    gpus: Gpus | None = None
    utilization: float | None = None
    reserve_bytes: int | None = None
    weights_bytes: int | None = None
    way: str = ""
    """How the engine attaches host memory, by its name in `hostprep engines`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """One model, sized."""

    sizing: Sizing
    """With an engine: of one request and without a GPU tier, for the engine has its own way."""
    memory: Memory
    """What is there, or asked for, on each rank."""
    engine: EngineSizing | None = None
    budget: GpuBudget | None = None
    """Of the memory of --gpu; None where that is not given, or --gpu-memory is."""
    defaults: tuple[str, ...] = ()
    """What was taken where no option says, in sentences."""
    way: str = ""
    """Of attaching host memory that a pool would be for."""

    @property
    def notes(self) -> tuple[str, ...]:
        """All that people are to know beside the tables."""
        return (*self.defaults, *self.sizing.notes, *(self.engine.notes if self.engine else ()))

    @property
    def limits(self) -> Limits:
        """What is served."""
        return self.engine.limits if self.engine else self.sizing.limits

    @property
    def host_bytes(self) -> int:
        """Bytes of all ranks' host memory together; 0 where the engine has no host tier.

        Of the ways to attach it that which a pool would be for.
        """
        if self.engine is not None:
            tiers = self.engine.host
            own = [host.size_bytes for host in tiers if host.way == self.way]
            return max(own or [host.size_bytes for host in tiers], default=0)
        return self.sizing.host.size_bytes * self.limits.ranks


def request_of(options: dict[str, Any]) -> Request:
    """Check what needs no model. Raises BadInputError naming the option."""
    request = Request(
        limits={field.name: options[field.name] for field in fields(Limits)},
        choice=TypeChoice(
            kv=options["kv_dtype"], index=options["index_dtype"], state=options["state_dtype"]
        ),
        memory=Memory(
            gpu_bytes=_bytes("--gpu-memory", options["gpu_memory"]),
            host_bytes=_bytes("--host-memory", options["host_memory"]),
            host_tokens=_positive("--host-tokens", options["host_tokens"]),
        ),
        engine=options["engine"],
        way=options["integration"] or "",
        gpus=None if options["gpu"] is None else find_gpus(options["gpu"]),
        utilization=_share("--gpu-memory-utilization", options["gpu_memory_utilization"]),
        reserve_bytes=_bytes("--gpu-reserve", options["gpu_reserve"], zero=True),
        weights_bytes=_bytes("--weights", options["weights"]),
    )
    limits = Limits(**_filled(request.limits))
    if request.gpus is not None:
        check_ranks(request.gpus, limits)
        check_memory(request.gpus, request.memory.gpu_bytes)
    else:
        _check_no_gpu(options)
    return request


def _check_no_gpu(options: dict[str, Any]) -> None:
    for key in ("gpu_memory_utilization", "gpu_reserve", "weights"):
        if options[key] is not None:
            raise BadInputError(
                f"--{key.replace('_', '-')} is for the memory of GPUs that are named",
                remedy="give --gpu with it, such as h200x8",
            )


def size_one(files: ModelFiles, request: Request) -> Sized:
    """Size one model. Raises BadInputError naming the field or the option."""
    config = load_config(files.config, source=files.source, quantization=files.quantization)
    rules = None if request.engine is None else rules_of(request.engine)
    device = _device(request.gpus)
    choice = request.choice if rules is None else rules.types(config, request.choice, device)
    drafts = request.limits["speculative_tokens"]
    model = read_model(config, name=files.name, choice=choice, drafts=drafts)
    limits = dict(request.limits)
    if limits["max_seq_len"] is None:
        limits["max_seq_len"] = _longest(config, model)
    own = None if rules is None else _own_defaults(rules, model, limits, device)
    defaults = _take_defaults(limits, own)
    if own is not None and request.gpus is None:
        defaults.append(f"the GPU is taken to be {device.name}; --gpu names another")
    if limits["tokens_per_block"] is None:
        model, limits["tokens_per_block"] = _with_blocks(model)
    served = Limits(**_filled(limits))
    if rules is not None:
        longer = os.environ.get(ALLOW_LONGER[rules.name], "").lower() in ("1", "true")
        check_starts(rules.name, config, served, allows_longer=longer)
        own = rules.defaults(model, served, device)  # the share of memory, by what is served
    budget = _budget(files, model, served, request, own)
    memory = request.memory
    if budget is not None:
        memory = replace(memory, gpu_bytes=budget.caches_bytes)
        defaults += _budget_defaults(request, budget, own)
        if drafts and not model.draft_layers:
            defaults.append(
                "the weights of a draft model of its own are not counted: add them to --gpu-reserve"
            )
    try:
        if rules is None:
            engine, sizing = None, size_model(model, served, memory)
        else:
            engine = rules.size(model, served, memory, device)
            sizing = _of_one_request(model, served, memory)
    except BadInputError as error:
        if budget is None or not error.message.startswith("--gpu-memory: "):
            raise
        raise _too_little(error, budget) from error
    return Sized(
        sizing=sizing,
        memory=memory,
        engine=engine,
        budget=budget,
        defaults=tuple(defaults),
        way=request.way,
    )


def _own_defaults(
    rules: EngineRules, model: Model, limits: dict[str, Any], device: Device
) -> EngineDefaults:
    """Return what the engine takes beside what is given: one may depend on another."""
    own = rules.defaults(model, Limits(**_filled(limits)), device)
    step = limits["max_num_tokens"] or own.max_num_tokens.value
    return rules.defaults(model, Limits(**_filled({**limits, "max_num_tokens": step})), device)


def _of_one_request(model: Model, limits: Limits, memory: Memory) -> Sizing:
    """Size for one request, or for as long a one as the host memory that is given holds.

    An engine's host tier may be smaller than a request: what is not in it is computed again.
    Raises BadInputError naming --host-memory where it does not hold a block of each group.
    """
    alone = limits.for_batch(1)
    notes = size_model(model, alone, Memory()).notes
    length = alone.max_seq_len
    while True:
        try:
            sizing = size_model(model, alone.for_length(length), replace(memory, gpu_bytes=None))
        except BadInputError as error:
            if length == 1 or not error.message.startswith("--host-memory: "):
                raise
            length //= 2
        else:
            return replace(sizing, notes=notes)


def _take_defaults(limits: dict[str, Any], own: EngineDefaults | None) -> list[str]:
    """Fill in what no option says, and return what was filled in, in sentences."""
    if own is None:
        if limits["max_batch_size"] is not None:
            return []
        limits["max_batch_size"] = BATCH_SIZE
        return [
            f"{BATCH_SIZE} requests at once are taken; give --max-batch-size as your engine has it"
        ]
    told = []
    for name, default in (
        ("max_batch_size", own.max_batch_size),
        ("max_num_tokens", own.max_num_tokens),
        ("tokens_per_block", own.tokens_per_block),
    ):
        if limits[name] is None:
            limits[name] = default.value
            told.append(f"--{name.replace('_', '-')} {default.value}: {default.why}")
    return told


def _device(gpus: Gpus | None) -> Device:
    if gpus is None:
        return DEFAULT_DEVICE
    gpu = gpus.gpu
    return Device(name=gpu.product, capability=gpu.capability, memory_bytes=gpu.memory_bytes)


def _filled(limits: dict[str, Any]) -> dict[str, Any]:
    """Return the limits with the usual ones where none is given."""
    usual = {
        "max_batch_size": BATCH_SIZE,
        "max_seq_len": LONGEST_TOKENS,
        "max_num_tokens": STEP_TOKENS,
        "tokens_per_block": TOKENS_PER_BLOCK,
    }
    return {**limits, **{key: value for key, value in usual.items() if limits[key] is None}}


def _budget(
    files: ModelFiles,
    model: Model,
    limits: Limits,
    request: Request,
    own: EngineDefaults | None,
) -> GpuBudget | None:
    """Return what --gpu leaves for caches; None where it is not given, or --gpu-memory wins."""
    if request.gpus is None or request.memory.gpu_bytes is not None:
        return None
    weights = find_weights(files, model, limits, given=request.weights_bytes)
    reserve, utilization = request.reserve_bytes, request.utilization
    if utilization is None:
        utilization = UTILIZATION if own is None else own.gpu_memory_utilization
    if reserve is None:
        reserve = default_reserve_bytes(request.gpus.gpu, limits.ranks, request.engine)
    return GpuBudget(
        gpus=request.gpus,
        utilization=utilization,
        weights=weights,
        reserve_bytes=reserve,
        engine=request.engine,
    )


def _budget_defaults(request: Request, budget: GpuBudget, own: EngineDefaults | None) -> list[str]:
    """Say what of a GPU's memory was taken where no option says."""
    told = []
    if request.utilization is None:
        why = "what engines take" if own is None else own.utilization_why
        told.append(f"--gpu-memory-utilization {budget.utilization:g}: {why}")
    if request.reserve_bytes is None:
        told.append(
            f"--gpu-reserve {budget.reserve_bytes >> 30}Gi: a guess, by what others logged; the "
            "engine measures it at its start, and the GPU's numbers move with it"
        )
    return told


def _too_little(error: BadInputError, budget: GpuBudget) -> BadInputError:
    """Say it of the GPU: more memory cannot be given, more GPUs can."""
    fewer = (error.remedy or "").partition(" or ")[2]
    return BadInputError(
        f"--gpu: {error.message.removeprefix('--gpu-memory: ')}: {budget.reckoning} = "
        f"{format_bytes(budget.caches_bytes)}",
        reason=error.reason,
        remedy=f"give {f'{fewer}, or ' if fewer else ''}more --tp",
    )


def _longest(config: ModelConfig, model: Model) -> int:
    """Return how long the model's own sequences can be. Raises BadInputError if it says nothing."""
    if model.max_positions is None:
        raise BadInputError(
            f"{config.source}: does not say how long a sequence can be "
            "(max_position_embeddings is missing)",
            remedy="give --max-seq-len",
        )
    return model.max_positions


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


def _bytes(option: str, text: str | None, *, zero: bool = False) -> int | None:
    if text is None:
        return None
    try:
        return parse_quantity(text, zero=zero, rounds_up=True)
    except BadInputError as error:
        raise BadInputError(f"{option}: {error.message}", remedy=error.remedy) from error


def _positive(option: str, number: int | None) -> int | None:
    if number is not None and not 1 <= number <= 1 << 50:
        raise BadInputError(f"{option}: is {number}", remedy="give 1 or more")
    return number


def _share(option: str, share: float | None) -> float | None:
    if share is not None and not 0 < share <= 1:
        raise BadInputError(f"{option}: is {share:g}", remedy="give more than 0, and 1 at most")
    return share
