"""Telling one socket from the next one in its place: kubelet's, and our own."""

from __future__ import annotations

import os

__all__ = ["socket_identity"]


def socket_identity(path: str) -> tuple[int, ...] | None:
    """Return what tells the socket at a path from the next one there; None where there is none.

    File systems use a number again at once: the change time tells them apart.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_ctime_ns
