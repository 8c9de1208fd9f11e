"""Which part of the lease is this process's: SGLang has one process for each GPU."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Place", "place_in", "place_of"]


@dataclass(frozen=True)
class Place:
    """One of several that share something, counted from 0."""

    index: int = 0
    count: int = 1


def place_of(parallel: Any) -> Place:
    """Return a scheduler's place among those of its engine on this node.

    `parallel` is SGLang's `get_parallel()` (srt/runtime_context.py, 0.5.23): a process's rank in
    its replica's world, which lies on the nodes in contiguous pieces, and the replica's number.
    Where SGLang has published none of it, as in a process that builds a pool by itself, it is
    the only one.
    """
    try:
        world, nodes = int(parallel.launch_world_size), max(1, int(parallel.nnodes))
        rank, replicas = int(parallel.launch_world_rank), max(1, int(parallel.dp_size))
        # Also set for attention data parallelism, whose groups are ranks of one world.
        replica = int(parallel.dp_rank or 0) if replicas > 1 else 0
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return Place()
    here = max(1, world // nodes)
    return Place(replica * here + rank % here, replicas * here)


def place_in(regions: int, ranks: Place) -> tuple[int, Place]:
    """Return which of the lease's regions is a rank's, and its place among those who share it.

    Raises BadInputError where the ranks cannot share the regions evenly.
    """
    if ranks.count % regions or not 0 <= ranks.index < ranks.count:
        raise BadInputError(
            f"SGLang's rank {ranks.index} of {ranks.count} on this node finds {regions} region(s) "
            "in its lease",
            reason="WrongCount",
            remedy="claim one region for all ranks, or as many as there are ranks on this node "
            "(`hostprep exec --count`)",
        )
    shared = ranks.count // regions
    return ranks.index // shared, Place(ranks.index % shared, shared)
