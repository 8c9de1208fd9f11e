"""vLLM's block manager of the CPU tier, for benchmarks.slots: run by vLLM's own interpreter.

Reads how many requests a batch has, a line each; answers with a line of JSON: seconds of CPU.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

from benchmarks.slots_trace import TOKENS_PER_BLOCK, Trace


def main() -> None:
    """Fill the manager, then serve batches until the input ends."""
    import vllm
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    slots = int(sys.argv[1])
    trace = Trace(slots)
    before = _resident_bytes()
    manager = CPUOffloadingManager(slots)
    for prompt in trace.prompts():
        keys = [make_offload_key(key, 0) for key in prompt]
        context = _context(manager, keys)
        manager.prepare_store(keys, context)
        manager.complete_store(keys, context)
        manager.on_request_finished(context)
    grown = _resident_bytes() - before
    print(json.dumps({"version": vllm.__version__, "bytes": grown}), flush=True)
    for line in sys.stdin:
        batch = [[make_offload_key(k, 0) for k in one] for one in trace.batch(int(line))]
        print(json.dumps(_turn(manager, batch)), flush=True)


def _lookups_s(manager: Any, batch: list[list[Any]], contexts: list[Any], *, every: bool) -> float:
    """Look up every block, or each request's blocks up to the first miss."""
    from vllm.v1.kv_offload.base import LookupResult

    begin = time.thread_time()
    for keys, context in zip(batch, contexts, strict=True):
        for key in keys:
            if manager.lookup(key, context) is not LookupResult.HIT and not every:
                break
    return time.thread_time() - begin


def _turn(manager: Any, batch: list[list[Any]]) -> dict[str, float]:
    from vllm.v1.kv_offload.base import LookupResult

    contexts = [_context(manager, keys) for keys in batch]
    every_s = _lookups_s(manager, batch, contexts, every=True)
    lookups_s = _lookups_s(manager, batch, contexts, every=False)
    hits = []
    begin = time.thread_time()
    for keys, context in zip(batch, contexts, strict=True):  # as its scheduler side does
        found = 0
        for key in keys:
            if manager.lookup(key, context) is not LookupResult.HIT:
                break
            found += 1
        hits.append(found)
        manager.prepare_load(keys[:found], context)
    for keys, context in zip(batch, contexts, strict=True):
        if manager.prepare_store(keys, context) is None:
            raise RuntimeError("the rival has no room")
    all_s = time.thread_time() - begin
    for keys, context, found in zip(batch, contexts, hits, strict=True):
        manager.complete_load(keys[:found], context)
        manager.complete_store(keys[found:], context)
        manager.on_request_finished(context)
    return {"every_s": every_s, "lookups_s": lookups_s, "all_s": all_s, "hits": sum(hits)}


def _context(manager: Any, keys: list[Any]) -> Any:
    from vllm.v1.kv_offload.base import ReqContext

    context = ReqContext("request")
    if hasattr(context, "set_offload_key_position"):
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, (number + 1) * TOKENS_PER_BLOCK)
    manager.on_new_request(context)
    return context


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
