"""Taking away the links by which engines found a region, once their lease is over."""

from __future__ import annotations

import contextlib
import os

from hostprep.client.sidecar import read_sidecar
from hostprep.errors import HostprepError
from hostprep.linux.files import closing_fd, open_beneath, open_folder
from hostprep.paths import PoolPaths

__all__ = ["remove_stale_links"]


def remove_stale_links(paths: PoolPaths, region: str) -> None:
    """Take away the links of the region's earlier leases, where they still lead to them.

    Containers that got the region as a device write theirs to their view's `links`, which is the
    pool's to them.
    """
    prefix = f"{region}@"
    for folder in (paths.links, *_links_of_views(paths)):
        _sweep(folder, prefix, f"{paths.links}/{prefix}")
    sidecar = read_sidecar(paths, region)
    for link in sidecar.links if sidecar else ():
        with contextlib.suppress(OSError, HostprepError):
            _remove_link(link, f"{paths.links}/{prefix}")


def _links_of_views(paths: PoolPaths) -> list[str]:
    try:
        return [f"{paths.devices}/{view}/links" for view in os.listdir(paths.devices)]
    except OSError:  # no devices, or we are in such a view
        return []


def _sweep(folder: str, prefix: str, leads_to: str) -> None:
    """Delete what begins or leads there: containers may have no other place for links that lasts.

    Engines write here: something that cannot be deleted must not keep the rest.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                link = f"{folder}/{name}"
                if name.startswith(prefix) or os.readlink(link).startswith(leads_to):
                    os.unlink(link)


def _remove_link(link: str, leads_to: str) -> None:
    """Delete an engine's link, if it is one and still leads there.

    Its path was written by whoever had the lease, and this may be root: no other link is
    followed on the way to it, and the folder is held while it is looked at and deleted.
    """
    folder, name = os.path.split(link)
    with closing_fd(open_folder("/")) as top:
        flags = os.O_RDONLY | os.O_DIRECTORY
        with closing_fd(open_beneath(top, folder.strip("/"), flags)) as fd:
            if os.readlink(name, dir_fd=fd).startswith(leads_to):
                os.unlink(name, dir_fd=fd)
