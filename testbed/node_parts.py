"""What a virtual node is made of, built, fetched or installed where it is missing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed import binaries
from testbed.cache import Say, builder_lock, cache_folder
from testbed.container_images import build_store
from testbed.control_plane import ControlPlane
from testbed.node import VirtualNode
from testbed.node_image import NodeImage, build_node_image
from testbed.qemu import Qemu, ensure_qemu
from testbed.versions import NODE_PROGRAMS

__all__ = ["NodeParts", "build_node_parts"]


@dataclass(frozen=True, slots=True)
class NodeParts:
    """QEMU, the node's disk, and the disk with the container images."""

    qemu: Qemu
    image: NodeImage
    store: Path

    def node(self, cluster: ControlPlane, **options: Any) -> VirtualNode:
        """A node of this cluster, not yet started; `options` are VirtualNode's."""
        return VirtualNode(cluster, qemu=self.qemu, image=self.image, store=self.store, **options)


def build_node_parts(say: Say) -> NodeParts:
    """Build what is missing or out of date; seconds when nothing is.

    Raises FailedError with the remedy: it needs root, and Debian's packages.
    """
    programs = binaries.build(NODE_PROGRAMS, say=say)
    cache = cache_folder()
    with builder_lock(cache, say):
        qemu = ensure_qemu(cache, say)
        image = build_node_image(programs, cache=cache, say=say)
    given = os.environ.get("TEST_ASSET_STORE")
    return NodeParts(qemu, image, Path(given) if given else build_store(say))
