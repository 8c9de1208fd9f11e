"""SGLang's own sizes of its pools, by its own classes: run by SGLang's interpreter, without a GPU.

Reads a JSON list of cases from standard input (a model's folder, ranks, bytes, a page's tokens) and
prints, for each, what SGLang would make of it. Only what a start finds out on a GPU is given: the
memory that is left, and the context of ranks and options.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import sglang.srt.runtime_context as context

parallel = SimpleNamespace(
    attn_dcp_size=1,
    attn_tp_size=1,
    tp_size=1,
    pp_size=1,
    dcp_size=1,
    attn_cp_size=1,
    enable_dsa_cache_layer_split=False,
    enable_cp_tp_group_sharing=False,
)
schedule = SimpleNamespace(disable_overlap_schedule=False)
exec_ = SimpleNamespace(
    kernel=SimpleNamespace(dsa_prefill_backend="", dsa_decode_backend=""),
    mamba=SimpleNamespace(
        enable_mamba_extra_buffer=True,
        enable_mamba_extra_buffer_lazy=False,
        enable_linear_replayssm_spec=False,
    ),
)
memory = SimpleNamespace(
    disable_radix_cache=False,
    enable_hisparse=False,
    enable_unified_memory=False,
    enable_unified_cache_external_linker=False,
    enable_hierarchical_cache=False,
    enable_dsa_cache_layer_split=False,
)
disagg = SimpleNamespace(disaggregation_mode="null", disaggregation_decode_extra_slots=0)
spec = SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=None)


class _Context:
    def override(self, _source: str, **values: Any) -> None:
        vars(schedule).update(values)


for name, found in {
    "get_parallel": parallel,
    "get_schedule": schedule,
    "get_exec": exec_,
    "get_memory": memory,
    "get_disagg": disagg,
    "get_spec": spec,
    "get_context": _Context(),
}.items():
    setattr(context, name, lambda found=found: found)

from sglang.srt.configs.hybrid_arch import mambaish_config  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch, ModelConfig, is_deepseek_dsa  # noqa: E402
from sglang.srt.mem_cache import kv_cache_configurator as configurator  # noqa: E402
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import HostKVCache  # noqa: E402
from sglang.srt.model_executor import pool_configurator  # noqa: E402

pool_configurator.compute_page_shard_scratch_bytes = lambda *_, **__: 0


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's pools for one case."""
    parallel.attn_tp_size = parallel.tp_size = case["tp"]
    windows_off = _turns_windows_off(case["family_windows"])
    model = ModelConfig(model_path=case["folder"], disable_hybrid_swa_memory=windows_off)
    backend = case["dsa_backend"]
    exec_.kernel.dsa_prefill_backend = exec_.kernel.dsa_decode_backend = backend
    vars(schedule).update(
        max_total_tokens=None,
        max_running_requests=None,
        max_mamba_cache_size=None,
        swa_full_tokens_ratio=0.8,
        mamba_full_memory_ratio=0.9,
        chunked_prefill_size=8192,
        page_size=case["page"],
    )
    _, dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=case["kv_dtype"],
        model=None,
        model_dtype=model.dtype,
        is_draft_worker=False,
        is_dflash=False,
        speculative_draft_attention_backend="",
    )
    drafts = case["drafts"]
    algorithm = SimpleNamespace(
        is_eagle=lambda: drafts > 0,
        is_standalone=lambda: False,
        is_dflash_family=lambda: False,
        is_none=lambda: drafts == 0,
    )
    kvc: Any = object.__new__(_Configurator)
    model.context_len = case["context"]
    values = {
        "model_config": model,
        "mambaish_config": mambaish_config(model),
        "hybrid_gdn_config": None,
        "hybrid_kda_config": None,
        "kv_cache_dtype": dtype,
        "kv_cache_dtype_str": case["kv_dtype"],
        "use_mla_backend": model.attention_arch == AttentionArch.MLA,
        "is_draft_worker": False,
        "is_hybrid_swa": model.is_hybrid_swa,
        "sliding_window_size": model.sliding_window_size or case["window"],
        "page_size": case["page"],
        "pp_size": 1,
        "attn_dp_size": 1,
        "spec_algorithm": algorithm,
        "spec_aux_config": SimpleNamespace(
            eagle_draft_num_layers=model.num_nextn_predict_layers if drafts else None,
            eagle_draft_swa_num_layers=None,
        ),
        "server_args": SimpleNamespace(enable_hisparse=False, enable_dsa_prefill_cp=False),
        "extra_mamba_cache_bytes_per_req": 0,
        "layer_info": SimpleNamespace(
            start_layer=0,
            end_layer=model.num_hidden_layers,
            num_effective_layers=model.num_hidden_layers,
            full_attention_layer_ids=model.full_attention_layer_ids,
            swa_attention_layer_ids=model.swa_attention_layer_ids,
        ),
    }
    for name, value in values.items():
        setattr(kvc, name, value)
    rest_gib = case["bytes"] / (1 << 30)
    if kvc.mambaish_config is not None:
        rest_gib = kvc._handle_max_mamba_cache(rest_gib)
    config = kvc.config_from_budget(int(rest_gib * (1 << 30)))
    cell = pool_configurator.create_memory_pool_configurator(kvc)._cell_size
    found = {
        "tokens": config.max_total_num_tokens,
        "swa_tokens": config.swa_max_total_num_tokens or 0,
        "state_slots": schedule.max_mamba_cache_size or 0,
        "running": kvc.resolve_max_num_reqs(config.max_total_num_tokens),
        "cell_bytes": cell,
        "is_dsa": is_deepseek_dsa(model.hf_config),
    }
    if case["host_gigabytes"]:
        host = object.__new__(_Host)
        HostKVCache.__init__(
            host,
            dtype=dtype,
            device_capacity_tokens=config.max_total_num_tokens,
            size_per_token=case["host_token_bytes"],
            start_layer=0,
            end_layer=1,
            host_to_device_ratio=2.0,
            host_size=case["host_gigabytes"],
            page_size=case["page"],
            layout="page_first",
            pin_memory=False,
            device="cpu",
            is_dummy=True,
        )
        found["host_tokens"] = host.size
    return found


def _turns_windows_off(windows: str) -> bool:
    """Return whether SGLang's overrides turn the pool of windows off for the model."""
    from sglang.srt.arg_groups.model_overrides.exaone import _exaone_overrides
    from sglang.srt.arg_groups.model_overrides.gemma2_gemma3 import _gemma2_gemma3_overrides
    from sglang.srt.arg_groups.model_overrides.olmo2 import _olmo2_overrides

    return windows in {f.__name__ for f in (_exaone_overrides, _gemma2_gemma3_overrides,
                                             _olmo2_overrides)}  # fmt: skip


class _Configurator(configurator.KVCacheConfigurator):  # type: ignore[misc]
    """SGLang's, without a draft's layers in the target's pools (`--enable-unified-memory`)."""

    def fused_entry_bytes(self, _name: str) -> None:
        return None


class _Host(HostKVCache):  # type: ignore[misc]
    """A host pool as far as its size goes."""

    def clear(self) -> None:
        pass


_Host.__abstractmethods__ = frozenset()


def main() -> None:
    found = []
    for case in json.load(sys.stdin):
        try:
            found.append(answer(case))
        except Exception as error:  # what SGLang refuses is an answer too
            found.append({"error": f"{type(error).__name__}: {error}"})
    print(json.dumps(found))


main()
