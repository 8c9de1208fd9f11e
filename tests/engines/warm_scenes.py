"""Plays the rows of the matrix: two starts' identities by vLLM's own configuration code.

Arguments: a folder with models `seed-1`, `seed-2`. Prints one JSON object, by row: what is wrong,
or an empty text.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from hostprep.engines.vllm.identity import (
    Identity,
    config_identity,
    engine_identity,
    rank_facts,
    ranks_identity,
    seed_identity,
    weights_identity,
)
from tests.engines.simple_engine import BLOCK_TOKENS, LAYERS, ROW_BYTES, cache_of
from tests.engines.warm_rows import ROWS, Row

_MODELS = Path(sys.argv[1])
_BLOCKS = 64
_BASE = Row("base", "", "")
_CONNECTOR = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


class OtherExecutor(UniProcExecutor):  # type: ignore[misc]
    """Stands for code that is not vLLM's."""


class _Backend:
    """Stands for an attention backend's class."""


class _OtherBackend:
    """Another one."""


class _Layer:
    """What a rank's layer says of itself."""

    def __init__(self, rank: str) -> None:
        self._k_scale_float = self._v_scale_float = 0.5 if rank == "scales" else 1.0
        self.calculate_kv_scales = rank == "dynamic"
        self._backend = _OtherBackend if rank == "backend" else _Backend

    def get_attn_backend(self) -> Any:
        return self._backend


def _model(row: Row) -> str:
    """Return a model's folder: always the same path, so that nothing but its contents differs."""
    folder = _MODELS / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(_MODELS / f"seed-{row.seed}", folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | dict(row.model)), "utf-8")
    return str(folder)


def _groups(change: str) -> KVCacheConfig:
    rows = (ROW_BYTES,) * len(LAYERS)
    cache = cache_of((*rows[1:], 2 * ROW_BYTES) if change == "rows" else rows)
    (group,) = cache.kv_cache_groups
    spec, names = group.kv_cache_spec, list(LAYERS)
    if change == "names":
        return _with(cache, [KVCacheGroupSpec([f"{name}.attn" for name in names], spec)])
    if change == "recurrent":
        state = MambaSpec(block_size=BLOCK_TOKENS, shapes=((2, 2),), dtypes=(torch.float32,))
        return _with(cache, [KVCacheGroupSpec(names[:2], spec), KVCacheGroupSpec(names[2:], state)])
    if change == "order":
        return _with(cache, [KVCacheGroupSpec(names[2:] + names[:2], spec)])
    return cache


def _with(cache: KVCacheConfig, groups: list[Any]) -> KVCacheConfig:
    return dataclasses.replace(cache, kv_cache_groups=groups)


def _ranks(config: Any, cache: Any, change: str) -> Identity:
    if change == "missing":
        return ranks_identity({}, 1)
    shape = (_BLOCKS, 2, BLOCK_TOKENS, 1, 32 if change == "shape" else 64)
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name in LAYERS}
    if change == "order":
        tensors = {name: one.transpose(1, 2) .contiguous().transpose(1, 2)
                   for name, one in tensors.items()}  # fmt: skip
    config.compilation_config.static_forward_context = {name: _Layer(change) for name in LAYERS}
    with _environment({"VLLM_SOMETHING_NEW": "1"} if change == "environment" else {}):
        return ranks_identity({0: rank_facts(config, cache, tensors)}, 1)


def _of_the_other_runner(config: Any) -> Any:
    kind = type(config)
    config.__class__ = type(kind.__name__, (kind,), {"use_v2_model_runner": True})
    return config


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.pop("PYTHONHASHSEED", None)  # whatever the tests run with
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start(row: Row, kept: Mapping[str, str]) -> Identity:
    """Return the identity of a start, all of it."""
    arguments: dict[str, Any] = {
        "model": _model(row), "skip_tokenizer_init": True, "max_model_len": 1024,
        "max_num_seqs": 8, "block_size": BLOCK_TOKENS, "enforce_eager": True,
        "kv_transfer_config": _CONNECTOR,
    } | dict(row.arguments)  # fmt: skip
    if arguments.get("tokenizer") == "seed-2":
        arguments["tokenizer"] = str(_MODELS / "seed-2")
    transfer = arguments.pop("kv_transfer_config")
    ray_runtime_env = arguments.pop("ray_runtime_env", None)  # which Ray says, where it runs
    weight_transfer = arguments.pop("weight_transfer_config", None)
    with _environment(row.environment):
        config = copy.deepcopy(EngineArgs(**arguments).create_engine_config())
        config.kv_transfer_config = KVTransferConfig(**transfer)
        config.weight_transfer_config = weight_transfer
        config.parallel_config.ray_runtime_env = ray_runtime_env
        if row.name == "runner":  # the other one needs Triton, which the CPU build lacks
            config = _of_the_other_runner(config)
        if row.name == "tokenizer_branch":  # vLLM would look for it in the hub
            config.model_config.tokenizer = "someone/other"
        if row.name == "fitted_length":  # as when memory has room for just as much
            config.model_config.max_model_len = 1024
        cache = _groups(row.groups)
        algorithm = config.cache_config.prefix_caching_hash_algo
        if algorithm != "xxhash":  # its package is not here, and its seed is never asked for
            kv_cache_utils.init_none_hash(get_hash_fn_by_name(algorithm))
        rows = 99 if row.name == "geometry" else 100
        parts = (
            config_identity(config, cache),
            engine_identity("0.33.0" if row.name == "release" else "0.32.0", "cpu", {"rows": rows}),
            weights_identity(config, kept, hub_cache="/nowhere", started_s=time.time() + 1),
            _ranks(config, cache, row.rank),
        )
        seed = seed_identity(kv_cache_utils.NONE_HASH)
    whole = seed
    for part in parts:
        whole = whole.joined(part)
    return whole


def play(row: Row, kept: Identity) -> str:
    """Return what is wrong with a row's second start; empty where nothing is."""
    try:
        now = start(row, kept.fields)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if row.is_unknown:
        return "" if row.names in now.unknown else f"unknown are {dict(now.unknown)}"
    if now.unknown:
        return f"unknown are {dict(now.unknown)}"
    found = [each.field for each in now.differences(kept.fields)]
    return "" if row.names in found else f"found are {found}"


def main() -> None:
    """Play all rows, and the one in which nothing differs."""
    kept = start(_BASE, {})
    assert not kept.unknown, kept.unknown
    same = start(_BASE, kept.fields)
    wrong = {"same": "; ".join(map(str, same.differences(kept.fields)))}
    wrong["fits"] = "" if len(json.dumps(dict(kept.fields))) < 60 << 10 else "larger than 60 KiB"
    print(json.dumps(wrong | {row.name: play(row, kept) for row in ROWS}))


if __name__ == "__main__":
    main()
