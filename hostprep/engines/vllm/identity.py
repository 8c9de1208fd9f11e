"""What KV blocks of a vLLM engine depend on, field by field: the identity of kept contents.

A block may serve another engine process only where every field is equal. The fields are those of
vLLM's resolved configuration; one that nobody judged counts (fail closed), and a value that has no
certain text, or is known to be uncertain, makes the identity *unknown*: nothing is kept then.
Never VllmConfig.compute_hash, which answers another question (which compiled graph fits).

Read for it: vLLM 0.32.0. This module takes vLLM's objects and imports nothing of vLLM.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import sys
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING

from hostprep.engines.weights import (
    UnknownError,
    check_format,
    folder_digest,
    folder_stamp,
    hub_commit,
    is_commit,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

NOT_COMPARED = "stamp:"
"""Fields that begin so are no part of the identity: they save the next start some work."""

_SHOWN = 120
_MOST_DEPTH = 12

_WHOLE = (
    "aux_output_config compilation_config device_config ec_manager_config ec_transfer_config "
    "instance_id kv_events_config logging_config observability_config offload_config "
    "optimization_level performance_mode profiler_config reasoning_config scheduler_config "
    "shutdown_timeout structured_outputs_config watermark_config weight_transfer_config"
)
"""Parts of VllmConfig that say how fast, how observed and in which order; weight_transfer_config
makes the identity unknown instead (see `_unknown_settings`)."""

_MODEL = (
    "model tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init revision "
    "hf_config_path allowed_local_media_path allowed_media_domains allow_deprecated_quantization "
    "enforce_eager return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel "
    "enable_trace_replay disable_cascade_attn enable_prompt_embeds served_model_name config_format "
    "hf_token generation_config override_generation_config enable_sleep_mode "
    "sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
    "enable_nccl_comm_suspend enable_cumem_allocator logits_processors io_processor_plugin "
    "renderer_num_workers model_weights"
)
"""The weights and the tokenizer themselves stand for the paths and the revisions by which they were
found (see `weights_identity`)."""

_CACHE = (
    "user_specified_block_size _block_size_resolved gpu_memory_utilization num_gpu_blocks_override "
    "num_gpu_blocks num_cpu_blocks kv_cache_memory_bytes kv_cache_size_tokens "
    "kv_cache_max_concurrency kv_offloading_size kv_offloading_backend enable_prefix_caching"
)

_PARALLEL = (
    "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port dp_sync_interval "
    "_data_parallel_master_port_list _coord_store_port data_parallel_backend "
    "data_parallel_external_lb data_parallel_hybrid_lb max_parallel_loading_workers "
    "ray_workers_use_nsight placement_group master_addr master_port numa_bind "
    "numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds "
    "cpu_distributed_timeout_seconds _api_process_count _api_process_rank enable_fault_tolerance "
    "fault_tolerance_config disable_custom_all_reduce enable_dbo ubatch_size "
    "dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization "
    "enable_shm_tensor_arena"
)

_LOAD = (
    "download_dir device use_tqdm_on_load safetensors_load_strategy "
    "safetensors_prefetch_num_threads safetensors_prefetch_block_size pt_load_map_location"
)

_KV_TRANSFER = (
    "kv_connector engine_id kv_buffer_device kv_buffer_size kv_port kv_ip kv_rank "
    "kv_parallel_size kv_connector_module_path kv_load_failure_policy"
)

_EXTRA = "spec_name spec_module_path cpu_bytes_to_use cpu_bytes_to_use_per_rank"

_MULTIMODAL = (
    "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type "
    "mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb "
    "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
)

HARMLESS: dict[str, frozenset[str]] = {
    "": frozenset(_WHOLE.split()),
    "model": frozenset(_MODEL.split()),
    "cache": frozenset(_CACHE.split()),
    "parallel": frozenset(_PARALLEL.split()),
    "load": frozenset(_LOAD.split()),
    "kv_transfer": frozenset(_KV_TRANSFER.split()),
    "kv_transfer.kv_connector_extra_config": frozenset(_EXTRA.split()),
    "model.multimodal_config": frozenset(_MULTIMODAL.split()),
    # Of the speculator: the target's own configuration is compared as the model's.
    "speculative": frozenset(("target_model_config", "target_parallel_config", "model")),
    "speculative.draft_model_config": frozenset(_MODEL.split()),
    "speculative.draft_parallel_config": frozenset(_PARALLEL.split()),
    "speculative.draft_load_config": frozenset(_LOAD.split()),
}
"""By configuration object: what was judged to leave KV blocks, their keys and their layout alone.
Everything else counts."""

_HARMLESS_VARIABLES = (
    "API_KEY CACHE_ROOT CONFIG_ROOT CONFIGURE_LOGGING DO_NOT_TRACK ENABLE_V1_MULTIPROCESSING "
    "ENGINE_ITERATION_TIMEOUT_S ENGINE_READY_TIMEOUT_S EXECUTE_MODEL_TIMEOUT_SECONDS HOST_IP "
    "HTTP_TIMEOUT_KEEP_ALIVE KEEP_ALIVE_ON_ENGINE_DEATH LOGGING_COLOR LOGGING_CONFIG_PATH "
    "LOGGING_LEVEL LOGGING_PREFIX LOGGING_STREAM LOG_STATS_INTERVAL LOOPBACK_IP NO_USAGE_STATS "
    "PORT RPC_BASE_PATH RPC_TIMEOUT RINGBUFFER_WARNING_INTERVAL SERVER_DEV_MODE USAGE_SOURCE "
    "USAGE_STATS_SERVER WORKER_MULTIPROC_METHOD WORKER_SHUTDOWN_TIMEOUT_SECONDS "
    "XGRAMMAR_CACHE_MB DP_MASTER_IP DP_MASTER_PORT DISABLE_COMPILE_CACHE CPU_KVCACHE_SPACE "
    "DEBUG_LOG_API_SERVER_RESPONSE DIST_IDENT OBJECT_STORAGE_SHM_BUFFER_NAME"
)
HARMLESS_VARIABLES = frozenset(f"VLLM_{name}" for name in _HARMLESS_VARIABLES.split())
"""vLLM's environment variables that change no KV block. VLLM_API_KEY is also a secret."""

_CODE = (
    "parallel.worker_cls parallel.worker_extension_cls parallel.distributed_executor_backend "
    "scheduler.scheduler_cls model.model_class_overrides compilation.backend "
    "compilation.inductor_passes"
)
"""Fields that may name code by its import path. What is not vLLM's may change under the same name.
"""

_PICKLING = ("sha256", "xxhash")
_RANDOM_SEEDS = ("xxhash", "xxhash_cbor")


@dataclass(frozen=True)
class Difference:
    """A field that differs: what was kept, and what is. None: the field was not there."""

    field: str
    was: str | None
    now: str | None

    def __str__(self) -> str:
        return f"{self.field} was {_shown(self.was)} and is {_shown(self.now)}"


@dataclass(frozen=True)
class Identity:
    """Every field that counts, and those that cannot be told, with the reason."""

    fields: Mapping[str, str]
    unknown: Mapping[str, str] = field(default_factory=dict)

    def joined(self, other: Identity) -> Identity:
        """Return the fields of both."""
        return Identity({**self.fields, **other.fields}, {**self.unknown, **other.unknown})

    def differences(self, kept: Mapping[str, str]) -> list[Difference]:
        """Return in which fields kept contents differ from this engine, sorted by name."""
        now = {name: text for name, text in self.fields.items() if _is_compared(name)}
        was = {name: text for name, text in kept.items() if _is_compared(name)}
        return [
            Difference(name, was.get(name), now.get(name))
            for name in sorted(now.keys() | was.keys())
            if was.get(name) != now.get(name)
        ]


def config_identity(vllm_config: Any, kv_cache_config: Any) -> Identity:
    """Return what the scheduler's process knows, but for the weights (`weights_identity`)."""
    found = _Fields()
    found.add_config("", vllm_config)
    found.add_groups(kv_cache_config)
    found.add_variables(os.environ)
    cache = vllm_config.cache_config
    found.add_hash(str(cache.prefix_caching_hash_algo))
    # By this length a model may choose its RoPE factors; memory may shorten the other one later.
    original = getattr(vllm_config.model_config, "original_max_model_len", None)
    found.put("model.original_max_model_len", original)
    found.put("model_runner_v2", getattr(vllm_config, "use_v2_model_runner", None))
    _unknown_settings(found, vllm_config)
    return found.identity()


def engine_identity(version: str, platform: str, geometry: Mapping[str, int]) -> Identity:
    """Return the engine's release, the platform, and how our layout divides the region."""
    fields = {"engine": f"vLLM {version}", "platform": platform}
    return Identity(fields | {f"layout.{name}": str(one) for name, one in geometry.items()})


def packages_identity() -> Identity:
    """Return the releases of what else may compute KV: transformers, and vLLM's plugins."""
    fields = {}
    for name in ("torch", "transformers"):
        try:
            fields[f"packages.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            fields[f"packages.{name}"] = "not installed"
    plugins = metadata.entry_points().select(group="vllm.general_plugins")
    named = {f"{one.value} {one.dist.version if one.dist else '?'}" for one in plugins}
    return Identity(fields | {"packages.plugins": ", ".join(sorted(named))})


def seed_identity(none_hash: bytes | None) -> Identity:
    """Return the hash from which every chain of block hashes begins, as vLLM has set it."""
    if not none_hash:
        return Identity({}, {"hash.seed": "vLLM has not set it"})
    return Identity({"hash.seed": bytes(none_hash).hex()})


def weights_identity(
    vllm_config: Any, kept: Mapping[str, str], *, hub_cache: str, started_s: float
) -> Identity:
    """Return the identity of the model's weights, of the drafter's, and of the tokenizer.

    Some models compute KV with the tokenizer, as those with Engram do, which hash normalised tokens
    (vllm/models/deepseek_v41/common/engram.py).

    It may read all of a local folder: minutes. Not where `kept` has the digest of the same files.
    """
    models = {"weights": (vllm_config.model_config, vllm_config.load_config)}
    speculative = vllm_config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft is not vllm_config.model_config:
        load = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
        models["drafter.weights"] = (draft, load)
    fields: dict[str, str] = {}
    unknown: dict[str, str] = {}
    for name, (model, load) in models.items():
        try:
            check_format(str(getattr(load.load_format, "value", load.load_format)))
            cache = getattr(load, "download_dir", None) or hub_cache
            fields.update(_weights(name, model, kept, hub_cache=cache, started_s=started_s))
        except UnknownError as error:
            unknown[name] = error.message
    try:
        found = _tokenizer(vllm_config.model_config, kept, hub_cache, started_s=started_s)
        fields.update(found)
    except UnknownError as error:
        unknown["tokenizer"] = error.message
    return Identity(fields, unknown)


def rank_facts(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> Identity:
    """Return what only a rank knows: its tensors, their layers' attention backends and scales.

    And its environment, which need not be the scheduler's: Ray starts ranks in one of their own.
    """
    layers = getattr(vllm_config.compilation_config, "static_forward_context", {})
    columns: dict[str, list[str]] = {}
    unknown: dict[str, str] = {}
    for name, tensor in kv_caches.items():
        layer = layers.get(name)
        row = _tensor_facts(tensor, kv_cache_config.num_blocks)
        row["attention_backend"] = _backend_of(layer)
        row["scales"] = _scales_of(layer)
        if getattr(layer, "calculate_kv_scales", False):
            unknown["scales"] = f"layer {name} takes its KV scales from the first request"
        for key, text in row.items():
            columns.setdefault(key, []).append(text)
    fields = {key: _column(texts) for key, texts in columns.items()}
    fields["layers"] = ",".join(kv_caches)
    fields["environment"] = json.dumps(_variables(os.environ))
    return Identity(fields, unknown)


def ranks_identity(facts: Mapping[int, Identity], world: int) -> Identity:
    """Return the identity of all ranks' facts together; unknown where one is missing."""
    missing = [rank for rank in range(world) if rank not in facts]
    if missing or len(facts) != world:
        return Identity({}, {"ranks": f"rank(s) {', '.join(map(str, missing))} said nothing"})
    fields, unknown = {}, {}
    for name in sorted({name for each in facts.values() for name in each.fields}):
        texts = [facts[rank].fields.get(name, "") for rank in range(world)]
        fields[f"ranks.{name}"] = _column(texts)
    for rank, each in sorted(facts.items()):
        unknown.update(
            {f"ranks.{name}": f"rank {rank}: {why}" for name, why in each.unknown.items()}
        )
    return Identity(fields, unknown)


class _Fields:
    """Collects fields by dotted names."""

    def __init__(self) -> None:
        self._fields: dict[str, str] = {}
        self._unknown: dict[str, str] = {}

    def identity(self) -> Identity:
        return Identity(self._fields, self._unknown)

    def put(self, name: str, value: Any) -> None:
        """Add a value as texts, whatever it consists of."""
        self._put(name, value, 0)

    def unknown(self, name: str, why: str) -> None:
        self._unknown[name] = why

    def add_config(self, where: str, config: Any, depth: int = 0) -> None:
        """Add all fields of a configuration object but the harmless ones."""
        harmless = HARMLESS.get(where, frozenset())
        for each in dataclasses.fields(config):
            if each.name in harmless:
                continue
            name = each.name if where else each.name.removesuffix("_config")
            self._put(f"{where}.{name}" if where else name, getattr(config, each.name, None), depth)

    def add_groups(self, kv_cache_config: Any) -> None:
        """Add the groups of layers in their order, and how their tensors are laid out."""
        for number, group in enumerate(kv_cache_config.kv_cache_groups):
            where, spec = f"groups.{number}", group.kv_cache_spec
            self.put(f"{where}.layers", ",".join(group.layer_names))
            self.put(f"{where}.kind", type(spec).__name__)
            self.put(f"{where}.spec", spec)
            for each in dataclasses.fields(group):
                if each.name not in ("layer_names", "kv_cache_spec"):
                    self.put(f"{where}.{each.name}", getattr(group, each.name))
            specs = getattr(spec, "kv_cache_specs", None) or {"": spec}
            if any(
                "Mamba" in base.__name__ for one in specs.values() for base in type(one).__mro__
            ):
                self.unknown(f"{where}.kind", "recurrent states are not kept")
        blocks = max(1, kv_cache_config.num_blocks)
        tensors = [
            [
                ",".join(getattr(tensor, "layers", None) or tensor.shared_by),
                getattr(tensor, "block_stride", None) or tensor.size // blocks,
            ]
            for tensor in kv_cache_config.kv_cache_tensors
        ]
        self.put("row_bytes", json.dumps(tensors))

    def add_variables(self, environ: Mapping[str, str]) -> None:
        for name, text in _variables(environ).items():
            self.put(f"environment.{name}", text)

    def add_hash(self, algorithm: str) -> None:
        """Add what the hash of blocks depends on besides its name, which is a field of `cache`."""
        if algorithm in _PICKLING:
            self.put("hash.python", ".".join(map(str, sys.version_info[:3])))
        if algorithm in _RANDOM_SEEDS and "PYTHONHASHSEED" not in os.environ:
            self.unknown(
                "hash.seed", f"{algorithm} has a random one in each process: set PYTHONHASHSEED"
            )

    def _put(self, name: str, value: Any, depth: int) -> None:
        text = _text_of(value)
        if text is not None:
            self._fields[name] = text
        elif depth > _MOST_DEPTH:
            self.unknown(name, "it is nested too deeply")
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):  # of transformers
            self._put_mapping(name, value.to_dict(), depth)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            self.add_config(name, value, depth + 1)
        elif isinstance(value, dict):
            self._put_mapping(name, value, depth)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self._put_list(name, value, depth)
        elif name == "quant":
            # It follows from the model's configuration, which is compared, and from its files.
            self._fields[name] = type(value).__qualname__
        else:
            self.unknown(name, f"a {type(value).__qualname__} cannot be compared")

    def _put_mapping(self, name: str, value: Mapping[Any, Any], depth: int) -> None:
        harmless = HARMLESS.get(name, frozenset())
        self._fields[name] = "a mapping" if value else "{}"
        for key in sorted(value, key=str):
            is_ours = name == "kv_transfer.kv_connector_extra_config" and str(key).startswith(
                "hostprep."
            )
            # Which release of transformers wrote the file says nothing about the model.
            if key in harmless or is_ours or key in ("_name_or_path", "transformers_version"):
                continue
            self._put(f"{name}.{key}", value[key], depth + 1)

    def _put_list(self, name: str, value: Iterable[Any], depth: int) -> None:
        items = list(value)
        if isinstance(value, (set, frozenset)):
            items.sort(key=str)
        if all(one is None or isinstance(one, (bool, int, float, str)) for one in items):
            self._fields[name] = json.dumps(items)
            return
        self._fields[name] = f"{len(items)} items"
        for number, one in enumerate(items):
            self._put(f"{name}.{number}", one, depth + 1)


def _unknown_settings(found: _Fields, vllm_config: Any) -> None:
    """Note settings by which weights may change without being seen, or ranks come and go."""
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        found.unknown("weight_transfer_config", "weights may be replaced while the engine runs")
    if getattr(vllm_config.parallel_config, "enable_elastic_ep", False):
        found.unknown("parallel.enable_elastic_ep", "ranks come and go")
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        found.unknown(
            "environment.VLLM_ENABLE_V1_MULTIPROCESSING",
            "the model is in its user's own process, which may change weights unseen",
        )
    if callable(getattr(vllm_config.model_config, "hf_overrides", None)):
        found.unknown("model.hf_overrides", "a function cannot be compared")
    for name in _CODE.split():
        part, _, attribute = name.partition(".")
        value = getattr(getattr(vllm_config, f"{part}_config", None), attribute, None)
        for one in value.values() if isinstance(value, dict) else (value,):
            if _is_foreign_code(one):
                found.unknown(name, f"{str(one)[:_SHOWN]} is code outside of vLLM")
    if getattr(vllm_config.speculative_config, "method", None) == "custom_class":
        found.unknown("speculative.method", "custom_class is code outside of vLLM")


def _is_foreign_code(value: Any) -> bool:
    """Tell whether a value is, or names by its import path, code that is not of vLLM's release."""
    if value is None or (isinstance(value, str) and "." not in value and ":" not in value):
        return False
    path = value if isinstance(value, str) else getattr(value, "__module__", "")
    return not path.startswith("vllm.")


def _weights(
    name: str, model: Any, kept: Mapping[str, str], *, hub_cache: str, started_s: float
) -> dict[str, str]:
    """Return the fields of one model's weights. Raises UnknownError."""
    if getattr(model, "model_weights", ""):
        raise UnknownError("they are streamed from an object store")
    _check_remote_code(model)
    if os.path.isdir(model.model):
        return _folder(name, model.model, kept, started_s=started_s)
    return {name: _hub_commit(model.model, model.revision, hub_cache, started_s=started_s)}


def _tokenizer(
    model: Any, kept: Mapping[str, str], hub_cache: str, *, started_s: float
) -> dict[str, str]:
    """Return the fields of a model's tokenizer. Raises UnknownError."""
    path, own = model.tokenizer or model.model, model.revision
    revision = model.tokenizer_revision or own
    if path == model.model and revision == own:
        return {"tokenizer": "the model's"}
    if os.path.isdir(path):
        return _folder("tokenizer", path, kept, started_s=started_s)
    # By its own revision, or, in Engram, by the model's.
    commits = [
        _hub_commit(path, each, hub_cache, started_s=started_s)
        for each in dict.fromkeys((revision, own))
    ]
    return {"tokenizer": ", ".join(commits)}


def _folder(name: str, path: str, kept: Mapping[str, str], *, started_s: float) -> dict[str, str]:
    stamp_at = f"{NOT_COMPARED}{name}"
    stamp = folder_stamp(path, started_s=started_s)
    if kept.get(stamp_at) == stamp and name in kept:
        return {name: kept[name], stamp_at: stamp}
    digest, stamp = folder_digest(path, started_s=started_s)
    return {name: f"sha256:{digest}", stamp_at: stamp}


def _hub_commit(model: str, revision: str | None, hub_cache: str, *, started_s: float) -> str:
    if os.path.exists(model) or ":" in model:
        raise UnknownError(f"{model} is neither a folder nor a model of the hub")
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise UnknownError("ModelScope does not say which commit was read: give a local folder")
    return hub_commit(model, revision, hub_cache, started_s=started_s)


def _check_remote_code(model: Any) -> None:
    """Raise UnknownError for code of another repository, or of another revision, not pinned."""
    if not getattr(model, "trust_remote_code", False):
        return
    named = getattr(model.hf_config, "auto_map", None) or {}
    elsewhere = any("--" in str(one) for one in named.values())
    if (elsewhere or model.code_revision) and not is_commit(model.code_revision):
        raise UnknownError("remote code without a commit: give it by --code-revision")


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return vLLM's variables but the harmless ones, sorted by name."""
    return {
        name: environ[name]
        for name in sorted(environ)
        if name.startswith("VLLM_") and name not in HARMLESS_VARIABLES
    }


def _text_of(value: Any) -> str | None:
    """Return the text of a value without parts; None for any other."""
    kind = type(value)
    if isinstance(value, enum.Enum):
        return str(value.value) if isinstance(value, (int, str)) else value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return str(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device"):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return None


def _tensor_facts(tensor: Any, blocks: int) -> dict[str, str]:
    """Return a KV tensor's shape and order, whatever the number of blocks that memory allowed."""
    tensors = tensor if isinstance(tensor, (list, tuple)) else [tensor]
    shapes, orders, steps = [], [], []
    for one in tensors:
        sizes, strides = list(one.shape), list(one.stride())
        at = next((i for i, size in enumerate(sizes) if size and size % blocks == 0), -1)
        shapes.append([f"{n // blocks}N" if i == at else n for i, n in enumerate(sizes)])
        orders.append(_order(strides))
        steps.append(strides[at] * one.element_size() if at >= 0 else None)
    return {
        "shape": json.dumps(shapes),
        "order": json.dumps(orders),
        "block_bytes": json.dumps(steps),
        "dtype": ",".join(str(one.dtype) for one in tensors),
    }


def _order(strides: list[int]) -> list[int]:
    """Return the dimensions, the one that lies furthest apart in memory first."""
    return sorted(range(len(strides)), key=lambda at: (-strides[at], at))


def _backend_of(layer: Any) -> str:
    get = getattr(layer, "get_attn_backend", None)
    if get is None:
        return type(layer).__qualname__
    backend = get()
    return f"{backend.__module__}.{backend.__qualname__}"


def _scales_of(layer: Any) -> str:
    names = ("_q_scale_float", "_k_scale_float", "_v_scale_float")
    return ",".join(str(getattr(layer, name, None)) for name in names)


def _column(texts: list[str]) -> str:
    """Return one text for a list: the common one, or all of them, by a digest where it is long."""
    if len(set(texts)) == 1:
        return texts[0]
    whole = json.dumps([*_runs(texts)])
    if len(whole) <= 1024:
        return whole
    return f"{len(set(texts))} kinds, sha256:{hashlib.sha256(whole.encode()).hexdigest()}"


def _runs(texts: list[str]) -> Iterator[list[Any]]:
    count = 0
    for at, text in enumerate(texts):
        count += 1
        if at + 1 == len(texts) or texts[at + 1] != text:
            yield [count, text]
            count = 0


def _is_compared(name: str) -> bool:
    return not name.startswith(NOT_COMPARED)


def _shown(text: str | None) -> str:
    if text is None:
        return "not there"
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
