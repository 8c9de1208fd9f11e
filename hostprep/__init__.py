"""Hostprep: a node's host memory, prepared once, handed to every inference engine.

`hostprep.attach` and its companions need nothing beyond the standard library (Python >= 3.9).
They are imported on first use, so that `import hostprep` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.client.attach import Attachment, attach, attach_many, join, wait
    from hostprep.client.owner import Owner
    from hostprep.errors import HostprepError

__all__ = [
    "Attachment",
    "HostprepError",
    "Owner",
    "__version__",
    "attach",
    "attach_many",
    "join",
    "wait",
]

__version__ = "0.1.0"

_archive = getattr(__spec__.loader if __spec__ else None, "archive", None)
if _archive is not None:  # imported from the zipapp: `hostprep.pyz` may be replaced under us
    from hostprep.zipapp import stay

    __path__ = [f"{stay(_archive)}/hostprep"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hostprep' has no attribute {name!r}")
    from importlib import import_module

    homes = {
        "Attachment": "hostprep.client.attach",
        "HostprepError": "hostprep.errors",
        "Owner": "hostprep.client.owner",
    }
    module = import_module(homes.get(name, "hostprep.client.attach"))
    return getattr(module, name)
