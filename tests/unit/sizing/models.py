"""The models of examples/models, read and sized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.engines import rules_of
from hostprep.sizing.engines.rules import DEFAULT_DEVICE, Device, EngineSizing
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import CacheGroup, Limits, groups_of
from hostprep.sizing.model import Model
from hostprep.sizing.size import Memory

MODELS = Path(__file__).parents[3] / "examples" / "models"


def model(name: str, *, drafts: int = 0, types: TypeChoice | None = None) -> Model:
    data = (MODELS / f"{name}.json").read_bytes()
    config = load_config(data, source=f"{name}.json")
    return read_model(config, name=name, choice=types, drafts=drafts)


def model_from(
    fields: Mapping[str, Any], *, drafts: int = 0, types: TypeChoice | None = None
) -> Model:
    config = load_config(json.dumps(fields).encode(), source="config.json")
    return read_model(config, name="made-up", choice=types, drafts=drafts)


def limits(**changes: Any) -> Limits:
    values = {"max_batch_size": 1, "max_seq_len": 1 << 20, "tokens_per_block": 128} | changes
    return Limits(**values)


def groups(
    name: str, *, served: Limits | None = None, types: TypeChoice | None = None
) -> dict[str, CacheGroup]:
    found = groups_of(model(name, types=types), served or limits())
    return {group.name: group for group in found}


def per_token(
    name: str, *chosen: str, served: Limits | None = None, types: TypeChoice | None = None
) -> float:
    """Bytes of one token in the groups that are named, or in all but states."""
    served = served or limits()
    found = groups(name, served=served, types=types)
    names = chosen or tuple(key for key, group in found.items() if not group.per_sequence)
    return sum(found[key].slot_bytes for key in names) / served.tokens_per_block


def size_for_engine(
    engine: str, model: Model, limits: Limits, memory: Memory, device: Device = DEFAULT_DEVICE
) -> EngineSizing:
    return rules_of(engine).size(model, limits, memory, device)
