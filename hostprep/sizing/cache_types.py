"""Which data types the caches of a model have, from its config and what the engine is told."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.sizing.config import ModelConfig
from hostprep.sizing.dtypes import AUTO, DTYPES, DType, dtype_named

__all__ = ["DS_MLA", "CacheTypes", "TypeChoice"]

DS_MLA = "fp8_ds_mla"
"""DeepSeek's own way to store latents in FP8: the part with positions stays in 16 bits."""
_8_BIT = 8
_DEFAULT = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeChoice:
    """What the engine is told; `auto` leaves it to the model.

    Raises BadInputError, naming the option, for a data type that is not known.
    """

    kv: str = AUTO
    index: str = AUTO
    """Of the keys that sparse attention selects tokens by."""
    state: str = AUTO
    """Of recurrent states."""

    def __post_init__(self) -> None:
        if self.kv not in (AUTO, DS_MLA):
            dtype_named(self.kv, field="--kv-dtype")
        for name, option in ((self.index, "--index-dtype"), (self.state, "--state-dtype")):
            if name != AUTO:
                dtype_named(name, field=option)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTypes:
    """The data types that a model's caches have."""

    model: DType
    kv: DType
    index: DType
    state: DType
    ds_mla: bool = False

    @classmethod
    def of(cls, config: ModelConfig, choice: TypeChoice) -> CacheTypes:
        """Resolve `auto`. Raises BadInputError for a data type that is not known.

        Keys and values have the model's type unless told otherwise; index keys follow them, as
        FP8 with a scale for 128 elements where those have 8 bits or fewer (vLLM and SGLang store
        128 + 4 bytes). States have the config's `mamba_ssm_dtype`, else float32, the larger of
        what engines choose (SGLang float32; vLLM the model's type).
        """
        key = "dtype" if config.has("dtype") else "torch_dtype"
        model = dtype_named(config.text(key, _DEFAULT), field=f"{config.source}: {key}")
        ds_mla = choice.kv == DS_MLA
        kv = model if choice.kv == AUTO else DTYPES["fp8"]
        if choice.kv != AUTO and not ds_mla:
            kv = dtype_named(choice.kv, field="--kv-dtype")
        index = DTYPES["fp8_block128"] if kv.bits <= _8_BIT else kv
        if choice.index != AUTO:
            index = dtype_named(choice.index, field="--index-dtype")
        where, state = f"{config.source}: mamba_ssm_dtype", "float32"
        if choice.state != AUTO:
            where, state = "--state-dtype", choice.state
        elif config.text("mamba_ssm_dtype", AUTO) != AUTO:
            state = config.text("mamba_ssm_dtype")
        return cls(
            model=model, kv=kv, index=index, state=dtype_named(state, field=where), ds_mla=ds_mla
        )
