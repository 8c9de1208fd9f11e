"""The two calls that last, made without the GIL whatever cuda-python the engine brings.

cuda-bindings lets go of the GIL during calls as of 12.9.1 (its release notes; 12.8.0 and 12.9.0
were seen to keep it): with an earlier one the whole engine would stand still while a chunk is
registered. ctypes lets go of it always.
"""

from __future__ import annotations

import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["long_calls"]

_RELEASES_GIL = (12, 9, 1)
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})\.(\d{1,4})", re.ASCII)


class _ByCtypes:
    """cuMemHostRegister and cuMemHostUnregister of the library that is loaded already."""

    def __init__(self) -> None:
        import ctypes

        library = ctypes.CDLL("libcuda.so.1")
        self._register = library.cuMemHostRegister_v2
        self._register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._unregister = library.cuMemHostUnregister
        self._unregister.argtypes = (ctypes.c_void_p,)

    def cuMemHostRegister(self, address: int, size_bytes: int, flags: int) -> tuple[int]:  # noqa: N802
        return (self._register(address, size_bytes, flags),)

    def cuMemHostUnregister(self, address: int) -> tuple[int]:  # noqa: N802
        return (self._unregister(address),)


def long_calls(api: Any) -> Any:
    """Return what to make these calls by: the driver module, if it lets go of the GIL.

    Raises OSError or AttributeError where the library is not what it says it is.
    """
    package = sys.modules.get(api.__name__.rpartition(".")[0])
    found = _VERSION.match(str(getattr(package, "__version__", "")))
    version = tuple(int(part) for part in found.groups()) if found else (0,)
    return api if version >= _RELEASES_GIL else _ByCtypes()
