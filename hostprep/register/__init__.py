"""Registering prepared memory with CUDA, in the engine's process.

Needs the standard library until a registration is made; then cuda-python (`cuda-bindings>=12.8`).
Its names are imported on first use: the agent and the command line need parts of it only.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.register.call import register
    from hostprep.register.registration import Registration

__all__ = ["Registration", "register"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hostprep.register' has no attribute {name!r}")
    from importlib import import_module

    home = "call" if name == "register" else "registration"
    return getattr(import_module(f"hostprep.register.{home}"), name)
