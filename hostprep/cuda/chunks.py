"""Which part of an attachment is registered, and how much of it in one call to the driver."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from math import gcd
from mmap import PAGESIZE

from hostprep.backing import MIB
from hostprep.client.attach import Attachment
from hostprep.client.handoff import Region
from hostprep.errors import BadInputError
from hostprep.known_issues import ONE_CALL_LIMIT_BYTES
from hostprep.paths import PoolPaths
from hostprep.units import format_bytes

_LEAST_HALF_BYTES = 2 * MIB


@dataclass(frozen=True)
class ChunkPolicy:
    """What bounds a chunk; all sizes in bytes.

    From 512 MiB on, the driver's table of one call is larger than 2 MiB, and allocating it may
    compact memory with a lock held (open-gpu-kernel-modules pull request 1383): hence 480 MiB.
    """

    first_bytes: int
    """The first chunk, before any call was timed."""
    least_bytes: int = 64 * MIB
    most_bytes: int = 480 * MIB
    target_s: float = 0.05
    """How long one call should last."""
    page_bytes: int = PAGESIZE
    """Base pages, whatever the region's are: the kernel pins any of them by themselves, also those
    of a huge page (mm/gup.c), so that a chunk of a region in pages of 1 GiB is as short as others.
    """
    row_bytes: int = 0
    """Rows that no copy straddles; a copy across two registrations fails. 0: none."""

    def __post_init__(self) -> None:
        """Refuse what would never come to an end. Raises BadInputError."""
        if min(self.first_bytes, self.least_bytes, self.page_bytes) <= 0 or self.row_bytes < 0:
            raise BadInputError("chunks, pages and rows must have a size")
        if self.most_bytes < self.least_bytes or not self.target_s > 0:
            raise BadInputError(
                f"chunks from {self.least_bytes} to {self.most_bytes} bytes in {self.target_s} s",
                remedy="give a largest chunk that is not below the smallest, and a time above 0",
            )

    @property
    def step_bytes(self) -> int:
        """Chunks are multiples of this: base pages and, counted from the slice, whole rows."""
        return _step_bytes(self.page_bytes, self.row_bytes)

    def smaller_bytes(self, size_bytes: int) -> int:
        """Return half of a chunk, to find what it is in it that fails; all of it if it is small."""
        step = self.step_bytes
        half = size_bytes // 2 // step * step
        return half if half >= max(step, _LEAST_HALF_BYTES) else size_bytes


def next_chunk_bytes(
    policy: ChunkPolicy,
    *,
    offset_bytes: int,
    end_bytes: int,
    last_bytes: int = 0,
    last_s: float = 0.0,
) -> int:
    """Return the size of the chunk that begins at `offset_bytes`; 0 at the end.

    Offsets count from the slice's start. `last_bytes` and `last_s` are the size and the duration
    of the call before: a chunk is at most twice and at least half of that one, within the
    policy's bounds. Where a single step (a row, or pages and rows taken together) is larger than
    `most_bytes`, the chunk is that step: copies may not straddle.
    """
    left_bytes = end_bytes - offset_bytes
    if left_bytes <= 0:
        return 0
    step = policy.step_bytes
    most = max(1, policy.most_bytes // step)
    least = min(most, -(-policy.least_bytes // step))
    wanted = _wanted_steps(policy, step, last_bytes, last_s)
    return min(left_bytes, max(least, min(most, wanted)) * step)


def _wanted_steps(policy: ChunkPolicy, step: int, last_bytes: int, last_s: float) -> int:
    if last_bytes <= 0:
        return policy.first_bytes // step
    last = max(1, last_bytes // step)
    double, half = 2 * last, -(-last // 2)
    # Compared before dividing: a clock that did not advance, or one that jumped, is no error.
    if last_s * 2 <= policy.target_s:
        return double
    if last_s >= policy.target_s * 2:
        return half
    return max(half, min(double, int(last * policy.target_s / last_s)))


def check_slice(
    region_size_bytes: int, page_bytes: int, offset_bytes: int, size_bytes: int, row_bytes: int
) -> None:
    """Check the part of a region that is to be registered.

    Raises BadInputError, naming the numbers and what would do instead.
    """
    if offset_bytes < 0 or size_bytes <= 0 or row_bytes < 0:
        raise BadInputError(
            f"a slice of {size_bytes} bytes at offset {offset_bytes}, rows of {row_bytes}",
            reason="BadSlice",
            remedy="give an offset of 0 or more, a size above 0 and rows of 0 bytes (none) or more",
        )
    if offset_bytes + size_bytes > region_size_bytes:
        raise BadInputError(
            f"the slice [{offset_bytes}, {offset_bytes + size_bytes}) ends beyond the region's "
            f"{region_size_bytes} bytes",
            reason="BadSlice",
            remedy=f"at offset {offset_bytes} at most "
            f"{max(0, region_size_bytes - offset_bytes)} bytes are left",
        )
    if offset_bytes % page_bytes or size_bytes % page_bytes:
        start = offset_bytes - offset_bytes % page_bytes
        end = min(region_size_bytes, -(-(offset_bytes + size_bytes) // page_bytes) * page_bytes)
        raise BadInputError(
            f"the slice [{offset_bytes}, {offset_bytes + size_bytes}) cuts pages of "
            f"{format_bytes(page_bytes)}",
            reason="BadSlice",
            remedy=f"register [{start}, {end}), and give neighbours slices that share no page",
        )
    _check_step(size_bytes, row_bytes)


def _check_step(size_bytes: int, row_bytes: int) -> None:
    """Refuse rows that leave no place to end a chunk before one call gets too large."""
    smallest = min(size_bytes, _step_bytes(PAGESIZE, row_bytes))
    if smallest >= ONE_CALL_LIMIT_BYTES:
        raise BadInputError(
            f"rows of {row_bytes} bytes meet the end of a page of {format_bytes(PAGESIZE)} "
            f"every {format_bytes(smallest)} only, and drivers fail a call of "
            f"{format_bytes(ONE_CALL_LIMIT_BYTES)}",
            reason="BadRows",
            remedy=f"pad rows to a multiple of {PAGESIZE} bytes, or copy no more than a page",
        )


def _step_bytes(page_bytes: int, row_bytes: int) -> int:
    if row_bytes <= 0:
        return page_bytes
    return page_bytes // gcd(page_bytes, row_bytes) * row_bytes


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
        """Its name in messages."""
        end = self.offset_bytes + self.size_bytes
        return f"region {self.region.name}, slice [{self.offset_bytes}, {end})"

    def policy(self, bounds: ChunkPolicy | None, row_bytes: int) -> ChunkPolicy:
        """Return how to cut it: along its own rows, within the given bounds.

        By default beginning with what the agent, which knows the node, advises.
        """
        bounds = bounds or ChunkPolicy(first_bytes=self.region.attach.register_chunk_bytes)
        return replace(bounds, row_bytes=row_bytes)


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
