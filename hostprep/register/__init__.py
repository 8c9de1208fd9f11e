"""Registering prepared memory with CUDA: what engines import. The code is in `hostprep.cuda`.

Nothing is imported before it is used: `hostprep.register.board`, for one, needs no CUDA.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.cuda.registration import Registration, register

__all__ = ["Registration", "register"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hostprep.register' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("hostprep.cuda.registration"), name)
