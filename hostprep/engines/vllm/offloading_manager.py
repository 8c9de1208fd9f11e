"""The scheduler's half: vLLM's own manager behind the gate.

While the gate is closed nothing is in host memory, and nothing is brought there: every lookup is a
miss, and every store has nothing to do. Both are answers that vLLM gives itself, so that it
neither asks again nor warns (vllm/.../offloading/scheduler.py, _build_store_jobs).

A request is on the side it was first seen on for life. vLLM offers a request's blocks in order,
and does not offer those again that it was told are not needed: a request that changed sides would
have later blocks in host memory without the ones before, which no lookup ever reaches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import LookupResult, PrepareStoreOutput
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from hostprep.engines.vllm.offloading_compat import Forwarding

if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any, Protocol

    class GateState(Protocol):
        """What is asked of a gate: an attribute, at each request."""

        @property
        def is_open(self) -> bool: ...

        def close(self) -> None: ...


__all__ = ["GatedManager"]


class _Side:
    """Kept in a request's own context, and gone with it: whether it may use host memory."""

    def __init__(self, *, is_inside: bool) -> None:
        self.is_inside = is_inside


class GatedManager(Forwarding):  # type: ignore[misc]
    """Any manager of vLLM's, behind a gate; what is not about the gate goes to `inner`."""

    def __init__(self, inner: Any, gate: GateState) -> None:
        super().__init__(inner)
        self.gate = gate
        self._has_stepped = False

    def on_new_request(self, req_context: Any) -> Any:
        """Decide on the request's side."""
        self._is_inside(req_context)
        return self.inner.on_new_request(req_context)

    def lookup(self, key: Any, req_context: Any) -> Any:
        """Miss, for a request that stays outside; never "ask again"."""
        if not self._is_inside(req_context):
            return LookupResult.MISS
        return self.inner.lookup(key, req_context)

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> Any:
        """Store nothing of a request that stays outside: as if all of it were there already."""
        if not self._is_inside(req_context):
            return PrepareStoreOutput(
                keys_to_store=[], store_spec=CPULoadStoreSpec([]), evicted_keys=[]
            )
        return self.inner.prepare_store(keys, req_context)

    def on_schedule_end(self, context: Any) -> None:
        """Take note that the ranks were polled."""
        self._has_stepped = True
        self.inner.on_schedule_end(context)

    def has_pending_work(self) -> bool:
        """Have the engine take one step by itself once it is up, with or without a request.

        In it each rank is polled for the first time, and begins to register.
        """
        return not self._has_stepped or bool(self.inner.has_pending_work())

    def shutdown(self) -> None:
        """Stop watching the gate."""
        self.gate.close()
        self.inner.shutdown()

    def _is_inside(self, req_context: Any) -> bool:
        side = req_context.get_state(_Side)
        if side is None:
            side = _Side(is_inside=self.gate.is_open)
            req_context.set_state(side)
        return bool(side.is_inside)
