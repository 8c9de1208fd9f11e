"""Changes to a config.json that must not give a wrong number in silence.

A change is refused, with its field named; or changes nothing; or what comes of it follows from a
rule that is stated here and does not use the readers of hostprep.sizing: a field that is left out
has the default of the model's class in transformers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hostprep.errors import BadInputError
from hostprep.sizing.config import load_config
from hostprep.sizing.dtypes import TypeChoice
from hostprep.sizing.families import read_model
from hostprep.sizing.groups import Limits, groups_of

Fields = dict[str, Any]
Kept = Mapping[tuple[int | None, int, bool], float]
"""Bytes on one rank, by window, ratio and whether a state: of a token, or of a sequence's state."""

TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
_OTHER_MODEL = ("model_type", "architectures", "quantization_config")
"""Without one of these it is another model, or the same one before it was quantized."""
_DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""A file that does not count its layers for drafts has none: engines then draft otherwise."""
_INSTEAD = {"num_global_key_value_heads": "num_key_value_heads"}
"""What stands for a field that is left out (transformers 5.19, configuration_gemma4.py)."""
_BLOCK = 1024
_SEQUENCE = 1 << 26


def kept_by(
    config: bytes,
    *,
    quantization: bytes | None = None,
    ranks: int = 1,
    kv_dtype: str = "auto",
    drafts: int = 0,
) -> Kept:
    """What hostprep.sizing says that the model keeps. Raises BadInputError where it is refused."""
    read = load_config(config, source="config.json", quantization=quantization)
    model = read_model(read, name="model", choice=TypeChoice(kv=kv_dtype), drafts=drafts)
    limits = Limits(
        max_batch_size=1,
        max_seq_len=_SEQUENCE,
        tokens_per_block=_BLOCK,
        tensor_parallel=ranks,
        speculative_tokens=drafts,
    )
    kept: dict[tuple[int | None, int, bool], float] = {}
    for group in groups_of(model, limits):
        key = (group.window, group.ratio, group.per_sequence)
        entries = 1 if group.per_sequence else _BLOCK // group.ratio
        kept[key] = kept.get(key, 0) + group.slot_bytes / entries
    return kept


@dataclass(frozen=True, slots=True)
class Change:
    """One change, and which fields a refusal may name."""

    what: str
    names: tuple[str, ...]
    config: Fields
    must_refuse: bool = False
    same_as: Fields | None = None
    """A whole config with the same meaning, by the default of the model's class."""


def text_part(config: Fields) -> Fields:
    """The fields of the language model, innermost: the very object, not a copy."""
    while True:
        key = next((key for key in TEXT_PARTS if isinstance(config.get(key), dict)), None)
        if key is None:
            return config
        config = config[key]


def _changed(config: Fields, act: Callable[[Fields], None]) -> Fields:
    copied = copy.deepcopy(config)
    act(text_part(copied))
    return copied


def _layers(part: Fields) -> int:
    count = part.get("num_hidden_layers")
    return count if isinstance(count, int) else 4


def foreign_fields(part: Fields) -> Iterator[tuple[str, Any]]:
    """Fields of other families that tell about caches, and some that no family has yet."""
    count = _layers(part)
    yield from {
        "attention_chunk_size": 8192,
        "attn_layer_indices": [1],
        "attn_layer_offset": 4,
        "attn_layer_period": 8,
        "attn_type_list": [index % 2 for index in range(count)],
        "block_configs": [{"attention": {"no_op": True, "n_heads_in_group": None}}] * count,
        "cla_share_factor": 2,
        "compress_ratios": [4] * count,
        "full_attention_interval": 4,
        "global_head_dim": 512,
        "hybrid_layer_pattern": [1] * count,
        "hybrid_override_pattern": "M*" * (count // 2) + "M" * (count % 2),
        "index_head_dim": 128,
        "indexer_types": ["shared"] * count,
        "interleaved_window_size": 256,
        "kv_lora_rank": 256,
        "layer_types": ["linear_attention"] * count,
        "layers_block_type": ["mamba"] * count,
        "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4},
        "linear_num_key_heads": 16,
        "mamba_d_state": 128,
        "mamba_n_heads": 64,
        "num_attention_groups": 2,
        "num_global_key_value_heads": 2,
        "num_kv_shared_layers": 2,
        "qk_rope_head_dim": 32,
        "sliding_window": 128,
        "sliding_window_pattern": 7,
        "sparse_attention_config": {"sparse_index_dim": 128, "sparse_attention_freq": [1] * count},
        "ssm_state_size": 128,
        "state_size": 16,
        "swa_head_dim": 64,
        "swa_num_key_value_heads": 1,
        "v_head_dim": 64,
        # Published by kinds of models that are not known here.
        "differential_attention": True,
        "global_attn_idx": [1],
        "mixer_types": ["lightning"] * count,
        "num_recurrences": 4,
        "total_ut_steps": 4,
        # Nobody publishes these.
        "kv_reuse_interval": 2,
        "cross_layer_kv_sharing": True,
        "window_schedule": [128, 1024],
        "recurrent_state_dim": 64,
    }.items()


def changes_of(
    config: Fields,
    *,
    of_family: frozenset[str] = frozenset(),
    defaults: Mapping[str, Any] | None = None,
) -> Iterator[Change]:
    """Each change of one config.

    `of_family`: fields that the model's own family may have. `defaults`: of its class in
    transformers; None where it has none there.
    """
    part = text_part(config)
    yield from _dropped(config, part, defaults)
    yield from _of_other_types(config, part)
    yield from _renamed_kinds(config, part)
    yield from _added(config, part, of_family)
    yield from _contradicting(config, part)
    yield from _in_objects(config, part)


def _in_objects(config: Fields, part: Fields) -> Iterator[Change]:
    """The same within objects of layers (`..._config`), and within the first of a list of them."""
    for path, held in _objects(part):
        names = tuple(key for key in path if isinstance(key, str))
        for name, value in held.items():
            yield Change(f"{path} without {name}", (*names, name), _at(config, path, name))
            for wrong in _wrong_values(value):
                changed = _at(config, path, name, wrong)
                yield Change(f"{path} {name} = {wrong!r:.40}", (*names, name), changed)
        for name, value in foreign_fields(part):
            if name not in held:
                changed = _at(config, path, name, value)
                yield Change(f"{path} with {name}", (*names, name), changed, must_refuse=True)


def _objects(part: Fields) -> Iterator[tuple[tuple[str | int, ...], Fields]]:
    for key, value in part.items():
        if not key.endswith(("_config", "_configs")) or key == "quantization_config":
            continue
        if isinstance(value, dict):
            yield (key,), value
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from (
                ((key, 0, inner), v) for inner, v in value[0].items() if isinstance(v, dict)
            )


def _at(config: Fields, path: tuple[str | int, ...], name: str, *value: object) -> Fields:
    """A copy with another value at the end of the path; without the field where none is given."""
    copied = copy.deepcopy(config)
    held: Any = text_part(copied)
    for key in path:
        held = held[key]
    held.pop(name, None)
    if value:
        held[name] = value[0]
    return copied


def _dropped(config: Fields, part: Fields, defaults: Mapping[str, Any] | None) -> Iterator[Change]:
    for name in part:
        if name in _OTHER_MODEL:
            continue
        dropped = _changed(config, lambda fields, name=name: fields.pop(name))  # type: ignore[misc]
        same = None
        if name in _DRAFT_LAYERS:
            same = _changed(config, lambda fields, name=name: fields.update({name: 0}))  # type: ignore[misc]
        elif name in _INSTEAD:
            value = part.get(_INSTEAD[name])
            same = _changed(
                config,
                lambda fields, name=name, value=value: fields.update({name: value}),  # type: ignore[misc]
            )
        elif defaults is not None and (name in defaults or name == "head_dim"):
            value = defaults[name] if name in defaults else _plain_head_dim(part)
            same = _changed(
                config,
                lambda fields, name=name, value=value: fields.update({name: value}),  # type: ignore[misc]
            )
        # Or by another field, which then contradicts or has to stand instead of it.
        yield Change(f"without {name}", (name, "missing", *part), dropped, same_as=same)


def _plain_head_dim(part: Fields) -> object:
    """What engines take where neither file nor class says (vLLM 0.32, qwen3_moe.py, mixtral.py)."""
    try:
        return part["hidden_size"] // part["num_attention_heads"]
    except (KeyError, TypeError):
        return None


def _of_other_types(config: Fields, part: Fields) -> Iterator[Change]:
    for name, value in part.items():
        for wrong in _wrong_values(value):
            changed = _changed(
                config,
                lambda fields, name=name, wrong=wrong: fields.update({name: wrong}),  # type: ignore[misc]
            )
            yield Change(f"{name} = {wrong!r:.40}", (name,), changed)


def _wrong_values(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield from ("yes", 7, [])
    elif isinstance(value, int):
        yield from (str(value), value + 0.5, -value - 1, True, [value], {"value": value}, 10**30)
    elif isinstance(value, list) and value:
        yield from ("x", 3, {"0": value[0]}, [[]] * len(value))
    elif isinstance(value, str):
        yield from (17, [value], "\x00")
    elif isinstance(value, dict):
        yield from ("x", 3, [value])


def _renamed_kinds(config: Fields, part: Fields) -> Iterator[Change]:
    """A kind of layer that nobody knows, at the first, a middle and the last place."""
    for name, value in part.items():
        if isinstance(value, list) and len(value) > 1 and all(isinstance(v, str) for v in value):
            for index in {0, len(value) // 2, len(value) - 1}:
                kinds = [*value]
                kinds[index] = "hyper_attention"
                yield _with(config, name, kinds, f"{name}[{index}] = hyper_attention")
        if isinstance(value, str) and name.endswith("pattern") and len(value) > 1:
            yield _with(config, name, value[:-1] + "?", f"{name} ends with ?")
            if not name.startswith("mtp"):
                yield _with(config, name, value[:-1], f"{name} is one shorter", must_refuse=True)


def _with(
    config: Fields, name: str, value: object, what: str, *, must_refuse: bool = False
) -> Change:
    changed = _changed(config, lambda fields: fields.update({name: value}))
    return Change(what, (name,), changed, must_refuse)


def _added(config: Fields, part: Fields, of_family: frozenset[str]) -> Iterator[Change]:
    for name, value in foreign_fields(part):
        if name in part or name in of_family:
            continue
        yield _with(config, name, value, f"with {name}", must_refuse=True)
        if part is not config and name not in config:
            beside = copy.deepcopy(config)
            beside[name] = value
            yield Change(f"with {name} beside the text model", (name,), beside, must_refuse=True)


def _contradicting(config: Fields, part: Fields) -> Iterator[Change]:
    # Engines choose their code by it, and not by model_type.
    stranger = "BambaForCausalLM" if part.get("model_type") != "bamba" else "JambaForCausalLM"
    yield Change(
        "code of another family", ("architectures",), {**config, "architectures": [stranger]}, True
    )
    yield _with(config, "is_encoder_decoder", True, "with an encoder", must_refuse=True)
    heads, kv_heads = part.get("num_attention_heads"), part.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and "kv_lora_rank" not in part:
        wrong = next(n for n in range(2, heads + 2) if heads % n)
        yield _with(config, "num_key_value_heads", wrong, f"{heads} heads share {wrong}")
    count = part.get("num_hidden_layers")
    per_layer = [
        name
        for name, value in part.items()
        if isinstance(value, list | str) and len(value) == count and "mlp" not in name
    ]
    if per_layer and isinstance(count, int):
        # Lists may have items for layers that draft tokens: then fewer layers contradict nothing.
        drafting = part.get("num_nextn_predict_layers", 1)
        for other in (count - 1 - drafting, count + 1, count * 2):
            changed = _changed(
                config,
                lambda fields, other=other: fields.update(num_hidden_layers=other),  # type: ignore[misc]
            )
            yield Change(
                f"{other} layers and {per_layer[0]} for {count}",
                (f"{other} layers", "num_hidden_layers", *per_layer),
                changed,
                must_refuse=True,
            )
    kinds, interval = part.get("layer_types"), part.get("full_attention_interval")
    if isinstance(kinds, list) and isinstance(interval, int):
        yield _with(config, "full_attention_interval", interval + 1, "another interval than listed")
        yield _with(config, "layer_types", kinds[1:] + kinds[:1], "kinds moved by one layer")


def verdict(
    base: Kept | None, change: Change, *, quantization: bytes | None = None, drafts: int = 0
) -> str:
    """An empty string where the change does no harm, else what is wrong with what came of it.

    `base`: what the whole file keeps; None where it is refused.
    """
    kept, error = kept_or_refused(change.config, quantization, drafts)
    if error is not None:
        named = base is None or any(name in error.message for name in change.names)
        wrong = "" if named and error.remedy else f"refused without a word of it: {error}"
    elif change.must_refuse or (base is None and change.same_as is None):
        wrong = f"accepted, {'the same' if kept == base else 'changed'}: {_shown(kept)}"
    elif kept == base or (
        change.same_as and kept == kept_or_refused(change.same_as, quantization, drafts)[0]
    ):
        wrong = ""
    else:
        wrong = f"was {_shown(base)}, became {_shown(kept)}"
    return wrong


def kept_or_refused(
    config: Fields, quantization: bytes | None = None, drafts: int = 0
) -> tuple[Kept | None, BadInputError | None]:
    """What is kept, or why it is refused."""
    try:
        data = json.dumps(config).encode()
        return kept_by(data, quantization=quantization, drafts=drafts), None
    except BadInputError as error:
        return None, error


def _shown(kept: Kept | None) -> str:
    return str({key: round(value) for key, value in (kept or {}).items()})
