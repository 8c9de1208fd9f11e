"""Kubelet's folder for device plugins, and the sockets in it: kubelet's own and ours."""

from __future__ import annotations

import hashlib
import os

from hostprep.errors import BadInputError

_MAX_SOCKET_PATH = 107
"""sun_path of unix(7), less the final zero; kubelet dials by the absolute path."""


def plugins_folder(kubelet_dir: str) -> str:
    """Return kubelet's folder for device plugins, below its root folder (`--root-dir`)."""
    return f"{kubelet_dir.rstrip('/')}/device-plugins"


def socket_name(folder: str, pool: str) -> str:
    """Return the file name of a pool's socket; shortened where the path would be too long.

    Raises BadInputError for a folder that leaves no room for any.
    """
    short = hashlib.sha256(pool.encode()).hexdigest()[:12]
    for name in (f"hostprep-{pool}.sock", f"hostprep-{short}.sock"):
        if len(os.fsencode(f"{folder}/{name}")) <= _MAX_SOCKET_PATH:
            return name
    raise BadInputError(
        f"no socket fits into {folder}: its path is too long",
        reason="BadKubeletDir",
        remedy=f"give kubelet a --root-dir of at most {_MAX_SOCKET_PATH - 42} characters",
    )


def socket_identity(path: str) -> tuple[int, ...] | None:
    """Return what tells the socket at a path from the next one there; None where there is none.

    File systems use a number again at once: the change time tells them apart.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns
