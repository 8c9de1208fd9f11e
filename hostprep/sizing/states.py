"""Models with recurrent states: Mamba, gated delta nets, and their mixtures with attention."""

from __future__ import annotations

from hostprep.sizing.attention import attention_store, head_shape
from hostprep.sizing.config import CacheTypes, ModelConfig
from hostprep.sizing.model import Layers, Store, Vectors

_LINEAR = "linear_attention"
_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_WITHOUT_CACHE = ("mlp", "moe")


def delta_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Qwen3-Next and Qwen3.5 keep: every n-th layer attends, the others have a state.

    The state: a convolution of (kernel - 1) inputs over keys, queries and values in the model's
    type, and value_heads x key_elements x value_elements. `drafts`: tokens that are speculated,
    whose inputs the convolution keeps too. Source: vLLM, MambaStateShapeCalculator,
    gated_delta_net_state_shape.
    """
    count = config.layers()
    kinds = config.per_layer("layer_types", str)
    if kinds is None:
        period = config.integer("full_attention_interval")
        kinds = tuple("" if (i + 1) % period == 0 else _LINEAR for i in range(count))
    key_heads = config.integer("linear_num_key_heads")
    value_heads = config.integer("linear_num_value_heads")
    key_size = config.integer("linear_key_head_dim")
    value_size = config.integer("linear_value_head_dim")
    kept = config.integer("linear_conv_kernel_dim", least=2) - 1 + drafts
    state = Store(
        name="state",
        per_sequence=True,
        parts=(
            _conv(2 * key_heads, key_size * kept, types, "linear_num_key_heads"),
            _conv(value_heads, value_size * kept, types, "linear_num_value_heads"),
            Vectors(
                heads=value_heads,
                elements=key_size * value_size,
                dtype=types.state,
                name="linear_num_value_heads",
            ),
        ),
    )
    full = attention_store(head_shape(config), types)
    return tuple((state,) if kind == _LINEAR else (full,) for kind in kinds)


def mamba1_layers(config: ModelConfig, types: CacheTypes) -> Layers:
    """Return what Mamba keeps, and Jamba: inner x (kernel - 1), and inner x state elements.

    Source: Gu and Dao, Mamba (arXiv 2312.00752); vLLM, mamba1_state_shape.
    """
    prefix = "mamba_" if config.has("mamba_d_state") else ""
    if prefix:
        inner = config.integer("hidden_size") * config.integer("mamba_expand")
        state, kernel = config.integer("mamba_d_state"), config.integer("mamba_d_conv", least=2)
    else:
        inner = config.optional("intermediate_size", 0, least=0) or (
            config.integer("hidden_size") * config.integer("expand")
        )
        state, kernel = config.integer("state_size"), config.integer("conv_kernel", least=2)
    store = Store(
        name="state",
        per_sequence=True,
        parts=(
            Vectors(heads=inner, elements=kernel - 1, dtype=types.model, name="inner size"),
            Vectors(heads=inner, elements=state, dtype=types.state, name="inner size"),
        ),
    )
    if not config.has("attn_layer_period"):
        return ((store,),) * config.layers()
    period = config.integer("attn_layer_period")
    offset = config.integer("attn_layer_offset", least=0)
    full = attention_store(head_shape(config), types)
    return tuple(
        (full,) if index % period == offset else (store,) for index in range(config.layers())
    )


def mamba2_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Mamba 2 keeps in every layer, and Falcon H1, whose layers attend as well."""
    state = _mamba2_state(config, types, drafts)
    if config.text("model_type") == "falcon_h1":
        return ((attention_store(head_shape(config), types), state),) * config.layers()
    kinds = config.per_layer("layer_types", str) or config.per_layer("layers_block_type", str)
    if kinds is None:
        return ((state,),) * config.layers()
    full = attention_store(head_shape(config), types)
    return tuple((full,) if "attention" in kind else (state,) for kind in kinds)


def nemotron_layers(config: ModelConfig, types: CacheTypes, drafts: int) -> Layers:
    """Return what Nemotron-H keeps: its pattern says which layers have a state, attend, or neither.

    M is Mamba 2, * attention, - and E have no cache. Source: NemotronHConfig,
    hybrid_override_pattern.
    """
    kinds = config.per_layer("layers_block_type", str)
    if kinds is None:
        pattern = config.text("hybrid_override_pattern")
        if not pattern:
            raise config.missing("hybrid_override_pattern")
        if len(pattern) != config.layers() or not set(pattern) <= set(_NEMOTRON):
            raise config.wrong(
                "hybrid_override_pattern",
                f"has {len(pattern)} letters for {config.layers()} layers, or others than "
                f"{''.join(_NEMOTRON)}",
            )
        kinds = tuple(_NEMOTRON[letter] for letter in pattern)
    unknown = next((kind for kind in kinds if kind not in _NEMOTRON.values()), None)
    if unknown is not None:
        raise config.wrong("layers_block_type", f"names {unknown[:40]!r}")
    stores = {"mamba": (_mamba2_state(config, types, drafts),), "mlp": (), "moe": ()}
    stores["attention"] = (attention_store(head_shape(config), types),)
    return tuple(stores[kind] for kind in kinds)


def _mamba2_state(config: ModelConfig, types: CacheTypes, drafts: int) -> Store:
    """Return a Mamba 2 layer's state.

    (inner + 2 x groups x state) x (kernel - 1) in the model's type, and heads x head elements x
    state. Source: Dao and Gu, Mamba 2 (arXiv 2405.21060); vLLM, mamba2_state_shape.
    """
    heads = config.integer(_first(config, "mamba_num_heads", "mamba_n_heads", "num_heads"))
    size = config.integer(_first(config, "mamba_head_dim", "mamba_d_head", "head_dim"))
    state = config.integer(_first(config, "ssm_state_size", "mamba_d_state", "state_size"))
    groups = config.integer(_first(config, "mamba_n_groups", "n_groups"))
    kernel = config.integer(_first(config, "mamba_d_conv", "conv_kernel"), least=2)
    kept = kernel - 1 + drafts
    name = "mamba_num_heads"
    return Store(
        name="state",
        per_sequence=True,
        parts=(
            _conv(heads, size * kept, types, name),
            # Few groups are repeated on ranks that would have none, as few heads of keys are.
            _conv(2 * groups, state * kept, types, "n_groups"),
            Vectors(heads=heads, elements=size * state, dtype=types.state, name=name),
        ),
    )


def _first(config: ModelConfig, *keys: str) -> str:
    """Return the first of the fields that is there. Raises BadInputError where none is."""
    for key in keys:
        if config.has(key):
            return key
    raise config.missing(keys[0])


def _conv(heads: int, elements: int, types: CacheTypes, name: str) -> Vectors:
    return Vectors(heads=heads, elements=elements, dtype=types.model, name=name)
