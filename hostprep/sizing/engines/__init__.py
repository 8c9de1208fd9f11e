"""What engines do with a model's caches: the rules of each, by the name that `--engine` has."""

from __future__ import annotations

from hostprep.errors import BadInputError
from hostprep.sizing.engines.rules import DEFAULT_DEVICE, Device, EngineRules, EngineSizing
from hostprep.sizing.engines.sglang import SGLangRules
from hostprep.sizing.engines.trtllm import TrtLlmRules
from hostprep.sizing.engines.vllm import VllmRules
from hostprep.sizing.groups import Limits
from hostprep.sizing.model import Model
from hostprep.sizing.size import Memory

_RULES: tuple[EngineRules, ...] = (VllmRules(), SGLangRules(), TrtLlmRules())
ENGINES = {rules.name: rules for rules in _RULES}
"""By name. An engine's module is listed here and nowhere else."""


def rules_of(engine: str) -> EngineRules:
    """Return an engine's rules. Raises BadInputError, with the names that there are."""
    rules = ENGINES.get(engine)
    if rules is None:
        raise BadInputError(
            f"--engine: there are no rules of {engine!r}",
            remedy=f"choose from {', '.join(ENGINES)}, or leave it out",
        )
    return rules


def size_for_engine(
    engine: str,
    model: Model,
    limits: Limits,
    memory: Memory,
    device: Device = DEFAULT_DEVICE,
) -> EngineSizing:
    """Return what an engine makes of a model, limits and memory.

    Read the model with the types that `rules_of(engine).types` chooses. Raises BadInputError,
    naming the option, for what the engine refuses or its rules do not cover.
    """
    return rules_of(engine).size(model, limits, memory, device)
