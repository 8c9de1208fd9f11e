"""vLLM: its configuration completed, and the plugins that it loads by this package's name.

The plugins import vLLM: their names are imported on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.engines.vllm.connector import HostprepOffloadingConnector
    from hostprep.engines.vllm.offloading import HostprepOffloadingSpec
    from hostprep.engines.vllm.simple import HostprepSimpleConnector

__all__ = ["HostprepOffloadingConnector", "HostprepOffloadingSpec", "HostprepSimpleConnector"]
_HOMES = {
    "HostprepOffloadingConnector": "connector",
    "HostprepOffloadingSpec": "offloading",
    "HostprepSimpleConnector": "simple",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hostprep.engines.vllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"hostprep.engines.vllm.{_HOMES[name]}"), name)
