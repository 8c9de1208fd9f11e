"""A model's config.json, read without trust: nothing that tells about caches is passed over."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hostprep.errors import BadInputError

MAX_CONFIG_BYTES = 4 << 20
"""The largest published ones have about 100 KiB (a quantization entry for each tensor)."""
PUBLISHED_CONFIG = "give the model's own config.json, as its publisher wrote it"
"""The remedy for fields that are missing or wrong."""
_MAX_NUMBER = 1 << 31
_MAX_LAYERS = 4096
_TEXT_PARTS = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where models that also see or hear keep the language model's fields; may be nested."""

_TELLS = re.compile(
    r"window|chunk|lora_rank|rope_head|nope_head|nope_layer|rope_layer|rope_interval|head_dim|head_size"
    r"|layer_type|layers_type|block_type|block_config|block_size|layer_block|pattern|conv|ssm|mamba"
    r"|linear_|recurrent|delta|lightning|kda|gdn|rwkv|retention|(^|_)index|compress|latent|(^|_)kv(_|$)"
    r"|key_value|kv_head|head_kv|(^|_)n?_?heads?_kv|n_kv|multi_query|(^|_)mqa(_|$)|(^|_)gqa(_|$)"
    r"|attention_groups|heads_in_group|shared_layer|share_layer|layers_shared|reuse|yoco|(^|_)states?(_|$)"
    r"|(^|_)swa(_|$)|(^|_)cla(_|$)|attn_layer|attention_layer|attn_type|attn_config|attention_config"
    r"|attention_type|attn_module|attention_setting|other_setting|full_att|local_att|global_att|hybrid"
    r"|interval|period|nextn|mtp|sparse_att|sparsify|blocksparse|(^|_)dsa(_|$)|(^|_)nsa(_|$)|(^|_)mla(_|$)"
    r"|moba|engram|ngram|bidirectional|dilat|d_conv|d_state|d_head|memory|quant_algo|cache_"
    r"|cross_(\w+_)?(att|layer)|encoder_decoder|layer_group|block_sparse|sink_token|meta_token|retriev"
    r"|lstm|(^|_)lru(_|$)|(^|_)ttt(_|$)|hyena|time_mix|token_shift|recurr|(^|_)rnn|(^|_)gru(_|$)"
    r"|decoder_layer|encoder_layer|(^|_)(global|local|full|softmax|sliding|attn|attention)_(layer|block)"
    r"|(global|local|full|softmax|sliding|attn|attention|layer)\w*_(idx|indices|ids)"
    r"|(attn|attention)_(impl(_|$)|impls|method|mode|mechanism|variant|kind)|mixer_?(type|kind|layer|s?$)"
    r"|diff(erential)?_?(att|transformer|head)|ut_steps|(^|_)loop(s|ed|_|$)|repeat|unroll"
    r"|sharing|mixture_of_depth|skip_layer|layer_skip|query_group|query_head|streaming|(^|_)sinks?(_|$)"
    r"|(mem|prefix|virtual|register|landmark|gist|summary|persistent)_tokens?(_|$)"
    r"|(^|_)(key|value|kv|qk|qkv)_(dim|size|channels)"
)
"""What a field's name has in it that may tell what a layer keeps. Wide on purpose: tomorrow's
field is to be refused by name, and not to be passed over."""

_HARMLESS = frozenset(
    {
        # Of the library and of generation, not of the model.
        "chunk_size_feed_forward", "encoder_no_repeat_ngram_size", "no_repeat_ngram_size",
        "output_hidden_states", "use_cache", "scale_attn_by_inverse_layer_idx",
        "cache_implementation",  # looked at with the layers: families.py
        # What a selected token is, and how many: not what is kept of it.
        "index_topk", "index_n_heads", "indexer_rope_interleave",
        # Experts and dense layers.
        "moe_latent_size", "latent_moe_use_norm", "expert_layer_period", "expert_layer_offset",
        "mlp_layer_types", "moe_layer_interval", "hash_layer_pattern",
        "activation_sparsity_pattern", "moe_block_size", "mtp_mlp_layer_types",
        # Of images.
        "image_token_index", "video_token_index", "audio_token_index", "boi_token_index",
        "eoi_token_index", "eoa_token_index", "media_placeholder_token_index", "ignore_index",
        "use_unified_vision_chunk", "deepstack_visual_indexes",
    }
)  # fmt: skip
"""Fields whose names sound like caches, and that change none of them."""

_OTHER_NAMES = {
    **dict.fromkeys(
        ("num_layers", "n_layers", "n_layer", "decoder_layers", "num_decoder_layers", "n_blocks",
         "num_blocks", "depth", "num_transformer_layers"),
        "num_hidden_layers",
    ),
    **dict.fromkeys(("num_heads", "n_heads", "n_head", "num_query_heads"), "num_attention_heads"),
    **dict.fromkeys(("num_query_groups",), "num_key_value_heads"),
    **dict.fromkeys(("d_model", "n_embd", "model_dim"), "hidden_size"),
}  # fmt: skip
"""What other models call a field that readers look at: where both are there, they must agree."""

_TYPE_NAMES = ("dtype", "torch_dtype")
"""The newer and the older name of one field."""
_OF_THE_WHOLE = frozenset({"model_type", "architectures"})
"""Fields that the whole has for itself too; which ones go together is checked elsewhere."""

_NOT_READ = re.compile(
    r"vision|visual|audio|image|video|speech|projector|talker|token2wav|code2wav|codec|resampler"
    r"|perceiver|tokenizer|^rope_(scaling|parameters|theta)|rope_theta$|label|auto_map|task_specific|quantization_config|^generation"
    r"|connector|img_"
)
"""Objects beside the language model, of positions, or that are read elsewhere."""


class ModelConfig:
    """The language model's part of a config.json, and which of its fields were read."""

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        source: str,
        path: str = "",
        defaults: Mapping[str, Any] | None = None,
        outer: Mapping[str, Any] | None = None,
        inherited: frozenset[str] = frozenset(),
    ) -> None:
        self._fields = fields
        self._defaults = defaults or {}
        self._outer = outer or {}
        self._path = path
        self._inherited = inherited
        self._read: set[str] = set()
        self._parts: list[ModelConfig] = []
        self.source = source

    def of_class(self, defaults: Mapping[str, Any]) -> ModelConfig:
        """Return the same fields, none of them read yet, with the model class's own defaults.

        A default holds where the field is missing; null stays null, as in transformers.
        """
        return ModelConfig(
            self._fields,
            source=self.source,
            path=self._path,
            defaults=defaults,
            outer=self._outer,
            inherited=self._inherited,
        )

    def has(self, key: str) -> bool:
        """Whether the field is there and not null, or the class has a default for it."""
        return self._value(key) is not None

    def says(self, key: str) -> bool:
        """Whether the file itself has the field, and not null."""
        return self._fields.get(key) is not None

    def class_default(self, key: str) -> Any:
        """Return what the model's class fills in where the field is missing; None for nothing."""
        return self._defaults.get(key)

    def class_has(self, key: str) -> bool:
        """Whether the model's class is known to have the field, be it to compute it."""
        return key in self._defaults

    def _value(self, key: str) -> Any:
        return self._fields[key] if key in self._fields else self._defaults.get(key)

    def beside(self, key: str) -> Any:
        """Return what the file has under that name beside the language model's part, if anything.

        None where there is no part of its own.
        """
        return self._outer.get(key)

    def read(self, *keys: str) -> None:
        """Note that the fields were understood, whatever they hold."""
        self._read.update(keys)

    def telling(self, pattern: re.Pattern[str]) -> Iterator[str]:
        """Yield the fields with such names that hold something."""
        for key, value in self._fields.items():
            if pattern.search(key) and key not in self._read and not _is_neutral(value):
                yield key

    def read_matching(self, pattern: re.Pattern[str]) -> None:
        """Note that all fields with such names were understood."""
        self.read(*(key for key in self._fields if pattern.search(key)))

    def integer(self, key: str, *, least: int = 1, most: int = _MAX_NUMBER) -> int:
        """Return a number. Raises BadInputError where there is none, or none in range."""
        self.read(key)
        if not self.has(key):
            raise self.missing(key)
        value = self._value(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"is {_shown(value)}, not an integer from {least} to {most}")
        return value

    def optional(self, key: str, default: int, *, least: int = 1, most: int = _MAX_NUMBER) -> int:
        """Return a number, or the default where the field is missing or null."""
        self.read(key)
        return self.integer(key, least=least, most=most) if self.has(key) else default

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        self.read(key)
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, f"is {_shown(value)}, not true or false")
        return value

    def text(self, key: str, default: str = "") -> str:
        """Return a line of text."""
        self.read(key)
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 4096 or not value.isprintable():
            raise self.wrong(key, f"is {_shown(value)}, not a line of text")
        return value

    def value(self, key: str) -> Any:
        """Return what the field holds, of any type; for readers that check it themselves."""
        self.read(key)
        return self._value(key)

    def layers(self) -> int:
        """Return the number of layers."""
        return self.integer("num_hidden_layers", most=_MAX_LAYERS)

    def per_layer(self, key: str, of: type, *, extra: int = 0) -> tuple[Any, ...] | None:
        """Return a list with one item of that type for each layer; None where there is none.

        Up to `extra` further items, of layers that draft tokens, may follow and are returned.
        """
        items = self.listed(key, of)
        count = self.layers()
        if items is not None and not count <= len(items) <= count + extra:
            raise self.wrong(key, f"has {len(items)} items for {count} layers")
        return items

    def listed(self, key: str, of: type) -> tuple[Any, ...] | None:
        """Return a list of items of that type; None where there is none."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is of for item in value):
            raise self.wrong(key, f"is not a list of {of.__name__}s")
        if len(value) > 2 * _MAX_LAYERS:
            raise self.wrong(key, f"has {len(value)} items")
        return tuple(value)

    def part(self, key: str) -> ModelConfig | None:
        """Return an object's fields; what is not read of them is looked at as well."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(key, f"is {_shown(value)}, not an object")
        part = ModelConfig(value, source=self.source, path=f"{self._path}{key}.")
        self._parts.append(part)
        return part

    def parts(self, key: str) -> list[ModelConfig]:
        """Return the objects of a list."""
        found = []
        for index, value in enumerate(self.listed(key, dict) or ()):
            found.append(
                ModelConfig(value, source=self.source, path=f"{self._path}{key}[{index}].")
            )
        self._parts += found
        return found

    def check_all_read(self, family: str) -> None:
        """Raise BadInputError for a field that tells about caches and that nobody has read.

        By its name, whatever it may mean: a model that keeps something else than its family does
        must not be sized as if it did not.
        """
        self._check_against_whole()
        name = next(self.unread(), None)
        if name is not None:
            raise BadInputError(
                f"{self.source}: {name} may say what layers keep, and is not understood for "
                f"{family}",
                reason="UnknownArchitecture",
                remedy=f"give a model of a known kind; if {name.rpartition('.')[2]} changes no "
                "cache, a copy of the config.json without it",
            )

    def _check_against_whole(self) -> None:
        """Raise BadInputError for a field that was read and that the whole has otherwise."""
        for key in sorted(self._read - _OF_THE_WHOLE):
            value = self._value(key)
            for name in _TYPE_NAMES if key in _TYPE_NAMES else (key,):
                beside = self._outer.get(name)
                if value is not None and value != beside and not _is_neutral(beside):
                    why = f"is {_shown(value)}, and {name} beside it {_shown(beside)}"
                    raise self.wrong(key, f"{why}: they contradict each other")

    def unread(self) -> Iterator[str]:
        """Yield the fields that tell about caches and that nobody has read."""
        for key, value in self._fields.items():
            if key in self._read or key in _HARMLESS:
                continue
            same = _OTHER_NAMES.get(key)
            if same is None:
                yield from _telling(self._path + key, key, value)
            elif same in self._read and value != self._value(same) and not _is_neutral(value):
                yield self._path + key
        for part in self._parts:
            yield from part.unread()
        for key, value in self._outer.items():
            # Beside the language model's part: the same again, or of something else.
            same = _OTHER_NAMES.get(key)
            if same is not None and same in self._read:
                if value != self._value(same) and not _is_neutral(value):
                    yield key
            elif key not in _HARMLESS and self._fields.get(key) != value:
                yield from _telling(key, key, value)

    def missing(self, *keys: str) -> BadInputError:
        """Return the error for fields that are not there."""
        names = ", ".join(self._named(key) for key in keys)
        verb = "is" if len(keys) == 1 else "are"
        return BadInputError(
            f"{self.source}: {names} {verb} missing",
            reason="UnknownArchitecture",
            remedy=PUBLISHED_CONFIG,
        )

    def wrong(self, key: str, why: str, remedy: str = "") -> BadInputError:
        """Return the error for a field that cannot be."""
        return BadInputError(
            f"{self.source}: {self._named(key)} {why}",
            remedy=remedy or PUBLISHED_CONFIG,
        )

    def _named(self, key: str) -> str:
        """Return the field's name with its path; what the part has of the whole has none."""
        first = re.split(r"\W", key, maxsplit=1)[0]
        return key if first in self._inherited else f"{self._path}{key}"

    def unknown(self, key: str, why: str, remedy: str = "") -> BadInputError:
        """Return the error for a field that speaks of a cache that is not known here."""
        return BadInputError(
            f"{self.source}: {self._named(key)} {why}",
            reason="UnknownArchitecture",
            remedy=remedy or "give a model of a known kind",
        )


def _telling(name: str, key: str, value: object) -> Iterator[str]:
    """Yield the field's name if it may tell about caches: objects by what they hold."""
    if _is_neutral(value) or (_NOT_READ.search(key.lower()) and "cross" not in key.lower()):
        return
    if _TELLS.search(key.lower()):
        yield printable(name)
    elif isinstance(value, dict):
        for inner, held in value.items():
            if inner not in _HARMLESS:
                yield from _telling(f"{name}.{inner}", str(inner), held)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield from _telling(name, "", item)


def _is_neutral(value: object) -> bool:
    """Whether a value says that there is none of it."""
    if value is None or value is False or value == "":
        return True
    if isinstance(value, (int, float)):
        return value == 0
    if isinstance(value, list):
        return all(_is_neutral(item) for item in value)
    return isinstance(value, dict) and not value


def printable(name: str) -> str:
    """Return a name from an untrusted file as one line of text, cut off."""
    return "".join(char if char.isprintable() else "?" for char in name)[:120]


def load_config(data: bytes, *, source: str, quantization: bytes | None = None) -> ModelConfig:
    """Read a config.json. `source` names it in messages.

    `quantization`: the hf_quant_config.json beside it, which ModelOpt writes; where the
    config.json has a quantization of its own both must agree, which the types' reader checks.
    Raises BadInputError for more than 4 MiB, what is no JSON object, or a text model's part that
    is none.
    """
    document = _json_object(data, source)
    if quantization is not None:
        beside = _json_object(quantization, f"{source} (hf_quant_config.json)")
        document = {**document, "hf_quant_config": beside}
    return _text_part(document, source)


def _json_object(data: bytes, source: str) -> dict[str, Any]:
    if len(data) > MAX_CONFIG_BYTES:
        raise BadInputError(
            f"{source}: is larger than {MAX_CONFIG_BYTES >> 20} MiB",
            remedy="give a model's config.json, not its weights or tokenizer",
        )
    try:
        document = json.loads(
            data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_distinct
        )
    except (ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:120]
        raise BadInputError(
            f"{source}: is not JSON that can be used: {why}", remedy="give a model's config.json"
        ) from error
    if not isinstance(document, dict):
        raise BadInputError(f"{source}: holds no object", remedy="give a model's config.json")
    return document


def _no_constant(name: str) -> Any:
    """Return infinity, which published files have (limits of time steps); no other constant."""
    if name == "NaN":
        raise ValueError(f"{name} is not JSON")
    return float(name)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; one that has a field twice is read differently by everybody."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{printable(key)!r} is there twice")
            seen.add(key)
    return found


def _text_part(document: Mapping[str, Any], source: str) -> ModelConfig:
    fields, path = document, ""
    outer: dict[str, Any] = {}
    while True:
        present = [key for key in _TEXT_PARTS if fields.get(key) is not None]
        if not present:
            whole = _inherited(document, fields)
            return ModelConfig(
                whole,
                source=source,
                path=path,
                outer=outer,
                inherited=frozenset(key for key in whole if fields.get(key) is None),
            )
        if len(present) > 1:
            raise BadInputError(
                f"{source}: {path}{present[0]} and {path}{present[1]} contradict each other",
                remedy=PUBLISHED_CONFIG,
            )
        key = present[0]
        part = fields[key]
        if not isinstance(part, dict):
            raise BadInputError(
                f"{source}: {path}{key} is no object", remedy="give a model's config.json"
            )
        outer |= {name: value for name, value in fields.items() if name != key}
        fields, path = part, f"{path}{key}."


def _inherited(document: Mapping[str, Any], fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Let the part have the whole's types and kind, where it has none of its own."""
    keys = ("dtype", "torch_dtype", "model_type", "architectures", "hf_quant_config")
    kept = {key: document[key] for key in (*keys, "quantization_config") if key in document}
    own = {key: value for key, value in fields.items() if value is not None or key not in kept}
    if "dtype" in own or "torch_dtype" in own:
        kept = {key: value for key, value in kept.items() if key not in _TYPE_NAMES}
    return {**kept, **own}


def _shown(value: object) -> str:
    text = " ".join(repr(value)[:80].split())
    return text if len(text) <= 40 else text[:37] + "..."
