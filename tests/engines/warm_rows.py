"""The matrix of warm restarts: one row for each thing that may differ between two starts.

Each row changes one thing, and names the field that has to be reported. docs/engines/vllm-warm.md
shows this table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One start that differs from another in one thing."""

    name: str
    what: str
    """For people: what differs."""
    names: str
    """The field that is reported."""
    upstream: str = ""
    """Where somebody got wrong KV for want of this field, of vLLM's issues."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of vLLM's EngineArgs."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Of the model's config.json."""
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int = 1
    """Of the weights."""
    groups: str = ""
    """What is done to the groups of layers: see warm_scenes."""
    rank: str = ""
    """What is done to the rank's tensors: see warm_scenes."""
    is_unknown: bool = False
    """Nothing is kept, whatever was kept before."""


ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}

ROWS = (
    Row("weights", "other weights in the same folder", "weights", "#49261", seed=2),
    Row("dummy", "dummy weights", "weights", is_unknown=True, arguments={"load_format": "dummy"}),
    Row(
        "streaming", "weights streamed from an object store", "weights",
        is_unknown=True, arguments={"load_format": "runai_streamer"},
    ),
    Row(
        "transfer", "weights that a trainer replaces", "weight_transfer_config",
        is_unknown=True, arguments={"weight_transfer_config": {"backend": "nccl"}},
    ),
    Row("dtype", "dtype of the model, `auto` for the KV cache", "model.dtype", "#49438",
        arguments={"dtype": "float16"}),
    Row("kv_dtype", "dtype of the KV cache", "cache.cache_dtype", "#49438",
        arguments={"kv_cache_dtype": "fp8_e5m2"}),
    Row("runner", "model runner version", "model_runner_v2", "#49440"),
    Row("layout", "order of a KV tensor's dimensions", "ranks.order", "#55904", rank="order"),
    Row("tensor_parallel", "tensor parallel size", "parallel.tensor_parallel_size", "#55191",
        arguments={"tensor_parallel_size": 2}),
    Row("pipeline_parallel", "pipeline parallel size", "parallel.pipeline_parallel_size",
        arguments={"pipeline_parallel_size": 2}),
    Row("data_parallel", "data parallel size", "parallel.data_parallel_size",
        arguments={"data_parallel_size": 2}),
    Row("rope", "RoPE scaling in the model's folder",
        "model.hf_config.rope_parameters.rope_type", "#56311", model=ROPE),
    Row("overrides", "RoPE scaling by hf_overrides", "model.hf_overrides.rope_parameters.rope_type",
        "#56311", arguments={"hf_overrides": ROPE}),
    Row("fitted_length", "max_model_len fitted to memory", "model.original_max_model_len", "#56331",
        arguments={"max_model_len": -1}),
    Row("variable", "a variable of vLLM's that nobody judged", "environment.VLLM_SOMETHING_NEW",
        environment={"VLLM_SOMETHING_NEW": "1"}),
    Row("length", "max_model_len, by which LongRoPE chooses", "model.max_model_len", "#56331",
        arguments={"max_model_len": 512}),
    Row("block_size", "block size", "cache.block_size", arguments={"block_size": 64}),
    Row("hash", "hash algorithm", "cache.prefix_caching_hash_algo",
        arguments={"prefix_caching_hash_algo": "sha256_cbor"}),
    Row("random_hash", "a hash with a random seed", "hash.seed", is_unknown=True,
        arguments={"prefix_caching_hash_algo": "xxhash"}),
    Row("seed", "the hash's seed", "hash.seed", environment={"PYTHONHASHSEED": "7"}),
    Row("remote_code", "remote code without a commit", "weights", is_unknown=True,
        arguments={"trust_remote_code": True, "code_revision": "main"}),
    Row("tokenizer", "another tokenizer, by which Engram hashes tokens", "tokenizer",
        arguments={"tokenizer": "seed-2"}),
    Row("tokenizer_branch", "a tokenizer of the hub without a commit", "tokenizer",
        is_unknown=True),
    Row("random_numbers", "seed of the engine's random numbers", "model.seed",
        arguments={"seed": 7}),
    Row("worker", "workers' code from outside of vLLM", "parallel.worker_extension_cls",
        is_unknown=True, arguments={"worker_extension_cls": "json.JSONDecoder"}),
    Row("worker_class", "a worker from outside of vLLM", "parallel.worker_cls",
        is_unknown=True, arguments={"worker_cls": "json.JSONDecoder"}),
    Row("executor", "an executor from outside of vLLM", "parallel.distributed_executor_backend",
        is_unknown=True, arguments={
            "distributed_executor_backend": "tests.engines.warm_scenes.OtherExecutor"}),
    Row("scheduler", "a scheduler from outside of vLLM", "scheduler.scheduler_cls",
        is_unknown=True, arguments={"scheduler_cls": "json.JSONDecoder"}),
    Row("model_class", "a model's class from outside of vLLM", "model.model_class_overrides",
        is_unknown=True, arguments={"model_class_overrides": {"Other": "json:JSONDecoder"}}),
    Row("compiler", "a compiler from outside of vLLM", "compilation.backend",
        is_unknown=True, arguments={"compilation_config": {"backend": "json.dumps"}}),
    Row("passes", "a compiler's pass from outside of vLLM", "compilation.inductor_passes",
        is_unknown=True,
        arguments={"compilation_config": {"inductor_passes": {"p": "json.dumps"}}}),
    Row("ray", "environment that Ray gives its workers", "parallel.ray_runtime_env.env_vars.A",
        arguments={"ray_runtime_env": {"env_vars": {"A": "1"}}}),
    Row("rank_variable", "a variable of vLLM's in a rank's environment", "ranks.environment",
        rank="environment"),
    Row("drafter_class", "a speculator's class from outside of vLLM", "speculative.method",
        is_unknown=True, arguments={"speculative_config": {"method": "custom_class",
                                    "model": "json.JSONDecoder", "num_speculative_tokens": 2}}),
    Row("adapters", "LoRA switched on", "lora.max_loras",
        arguments={"enable_lora": True, "max_loras": 2}),
    Row("speculative", "a speculator", "speculative.method",
        arguments={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}),
    Row("chunks", "blocks a chunk", "kv_transfer.kv_connector_extra_config.blocks_per_chunk",
        arguments={"kv_transfer_config": {"kv_connector": "OffloadingConnector",
                   "kv_role": "kv_both", "kv_connector_extra_config": {"blocks_per_chunk": 2}}}),
    Row("group_order", "order of the groups of layers", "groups.0.layers", groups="order"),
    Row("layer_names", "names of layers", "groups.0.layers", groups="names"),
    Row("row_bytes", "bytes of a layer's block", "row_bytes", groups="rows"),
    Row("recurrent", "a group of recurrent states", "groups.1.kind", is_unknown=True,
        groups="recurrent"),
    Row("backend", "attention backend", "ranks.attention_backend", rank="backend"),
    Row("widths", "shape of a rank's tensors", "ranks.shape", rank="shape"),
    Row("scales", "KV scales", "ranks.scales", rank="scales"),
    Row("dynamic_scales", "KV scales taken from the first request", "ranks.scales",
        is_unknown=True, rank="dynamic"),
    Row("missing_rank", "a rank that said nothing", "ranks", is_unknown=True, rank="missing"),
    Row("release", "vLLM's release", "engine"),
    Row("geometry", "rows of the region", "layout.rows"),
)  # fmt: skip
