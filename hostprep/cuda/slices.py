"""The part of an attachment that is to be registered."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from hostprep.client.attachment import Attachment
from hostprep.client.handoff import Region
from hostprep.cuda.chunks import ChunkPolicy, check_slice
from hostprep.errors import BadInputError
from hostprep.paths import PoolPaths

__all__ = ["Slice", "buffer_of", "pool_of", "slice_of"]


@dataclass(frozen=True)
class Slice:
    """The part of a region that is to be registered, where it is mapped."""

    region: Region
    address: int
    offset_bytes: int
    size_bytes: int
    read_only: bool

    @property
    def name(self) -> str:
        """What messages call it."""
        end = self.offset_bytes + self.size_bytes
        return f"region {self.region.name}, slice [{self.offset_bytes}, {end})"

    def policy(self, bounds: ChunkPolicy | None, row_bytes: int) -> ChunkPolicy:
        """Return how to cut it: along its own pages and rows, within the given bounds.

        By default beginning with what the agent, which knows the node, advises.
        """
        bounds = bounds or ChunkPolicy(first_bytes=self.region.attach.register_chunk_bytes)
        return replace(bounds, page_bytes=self.region.page_bytes, row_bytes=row_bytes)


def slice_of(
    attachment: Attachment, offset_bytes: int, size_bytes: int | None, row_bytes: int
) -> Slice:
    """Return the checked slice; to the region's end by default. Raises BadInputError."""
    region = attachment.region
    size = region.size_bytes - offset_bytes if size_bytes is None else size_bytes
    check_slice(region.size_bytes, region.page_bytes, offset_bytes, size, row_bytes)
    return Slice(
        region=region,
        address=attachment.address + offset_bytes,
        offset_bytes=offset_bytes,
        size_bytes=size,
        read_only=buffer_of(attachment).readonly,
    )


def buffer_of(attachment: Attachment) -> memoryview:
    """Return the attachment's memory. Raises BadInputError once it is closed."""
    try:
        return attachment.buffer
    except ValueError as error:
        raise BadInputError(
            "the attachment is closed", reason="AttachmentClosed", remedy="attach again"
        ) from error


def pool_of(attachment: Attachment) -> PoolPaths:
    """Return where the attachment's pool lies, as this process sees it."""
    folder = attachment.path[: -len(attachment.region.path)].rstrip("/")
    return PoolPaths(*os.path.split(folder))
