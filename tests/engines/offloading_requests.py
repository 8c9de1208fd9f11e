"""Requests of offloading_plays.py, and what is written down of a manager's answers."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics


class Request:
    """A request as the scheduler sees it; its chunks are named by their whole prefix."""

    def __init__(self, number: int, path: str, groups: int, *, has_positions: bool) -> None:
        self.path = path
        self.context = ReqContext(req_id=f"r{number}")
        self.keys = [
            [
                make_offload_key(path[: end + 1].encode().rjust(32), group)
                for end in range(len(path))
            ]
            for group in range(groups)
        ]
        if has_positions:
            for keys in self.keys:
                for end, key in enumerate(keys):
                    self.context.set_offload_key_position(key, end + 1)
        self.state = "waiting"
        self.computed = self.next_stored = 0
        self.loads: list[bytes] = []
        self.told: set[bytes] = set()
        """What it claims: told to be there, and not given up since."""


def name_of(key: bytes) -> str:
    return f"{key[:-4].decode().strip()}/{key[-1]}"


def gauges_of(stats: Any) -> Any:
    """Return what both managers count alike: claims of those who wait are counted by ours alone."""
    values = stats.data["data"]
    return {
        name: values[name][()]
        for name in (
            CPUOffloadingMetrics.CPU_CACHE_WRITE_USAGE_PERC,
            CPUOffloadingMetrics.CPU_ALLOCATION_SIZE,
        )
        if name in values
    }
