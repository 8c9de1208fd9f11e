"""What engines do with a model's caches: the rules of each, by the name that `--engine` has."""

from __future__ import annotations

from hostprep.errors import BadInputError
from hostprep.sizing.engines.rules import EngineRules
from hostprep.sizing.engines.sglang import SGLangRules
from hostprep.sizing.engines.trtllm import TrtLlmRules
from hostprep.sizing.engines.vllm import VllmRules

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
