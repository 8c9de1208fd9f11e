"""The data-parallel ranks that a vLLM command runs on this node: each is an engine of its own.

vLLM 0.33 (vllm/engine/arg_utils.py create_engine_config, vllm/v1/engine/core.py run_engine_core):
every rank's engine_id gets the suffix `_dpRANK`, by its number in the whole deployment.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.engines.vllm.command_line import CommandLine
from hostprep.errors import BadInputError

__all__ = ["Ranks", "local_ranks", "workers", "workers_here"]

_SIZE = "--data-parallel-size"
_LOCAL = "--data-parallel-size-local"
_RANK = "--data-parallel-rank"
_START = "--data-parallel-start-rank"
_MOST = 1024
"""More ranks than any node has: a slip of the hand."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of this node."""

    numbers: tuple[int, ...] = (0,)
    is_parallel: bool = False
    """Whether vLLM tells them apart by a suffix."""

    def engine_ids(self, engine_id: str) -> tuple[str, ...]:
        """Return each rank's engine_id, as vLLM makes it."""
        if not self.is_parallel:
            return (engine_id,)
        return tuple(f"{engine_id}_dp{number}" for number in self.numbers)


def local_ranks(line: CommandLine) -> Ranks:
    """Return which ranks the command starts on this node.

    Raises BadInputError where only the other nodes could tell, or Ray starts them elsewhere.
    """
    size = _count(line, _SIZE)
    rank, start = line.number(_RANK), line.number(_START)
    for option, number in ((_RANK, rank), (_START, start)):
        if number is not None and number < 0:
            raise BadInputError(f"{option} {number} is negative", reason="BadCommand")
    if line.last("--data-parallel-backend") == "ray":
        raise BadInputError(
            "--data-parallel-backend ray has Ray start the ranks, outside of this command",
            reason="BadCommand",
            remedy="use the backend mp, or `hostprep exec` for each rank with --data-parallel-rank",
        )
    if rank is not None:
        return Ranks((rank,), is_parallel=size > 1 or rank > 0)
    local = line.number(_LOCAL)
    _check_known(line, size, local, start)
    count = _count(line, _LOCAL) if local is not None else size
    first = (start or 0) if local is not None else 0
    numbers = tuple(range(first, first + count))
    return Ranks(numbers, is_parallel=size > 1 or first > 0)


def workers(line: CommandLine) -> int:
    """Return how many processes with a GPU each data-parallel rank has, on all its nodes."""
    count = 1
    for kind in ("tensor", "pipeline", "prefill-context"):
        count *= max(1, line.number(f"--{kind}-parallel-size") or 1)
    return count


def workers_here(line: CommandLine) -> int:
    """Return how many of them are on this node, where a rank may span several.

    vllm/config/parallel.py, local_world_size and nnodes_within_dp. Raises as `local_ranks` does.
    """
    groups = max(1, _count(line, _SIZE) // len(local_ranks(line).numbers))
    nodes = max(1, (line.number("--nnodes") or 1) // groups)
    return max(1, workers(line) // nodes)


def _check_known(line: CommandLine, size: int, local: int | None, start: int | None) -> None:
    """Refuse what vLLM would derive from the number of this node among the others."""
    nodes = max(line.number("--nnodes") or 1, (line.number("--node-rank") or 0) + 1)
    external = line.has("--data-parallel-external-lb")
    derived = nodes > 1 and (local is None or start is None)
    ignored = start is not None and local is None  # vLLM takes it with the other one only
    if size > 1 and (derived or external or ignored):
        raise BadInputError(
            "which data-parallel ranks run on this node is for vLLM to find out",
            reason="BadCommand",
            remedy=f"say it: {_LOCAL} and {_START}, or {_RANK}",
        )
    if local == 0:
        raise BadInputError(
            f"{_LOCAL} 0 runs no engine on this node, so there is nothing to claim for",
            reason="BadCommand",
            remedy="leave `hostprep exec` out here",
        )


def _count(line: CommandLine, option: str) -> int:
    number = line.number(option)
    if number is None:
        return 1
    if not 1 <= number <= _MOST:
        raise BadInputError(f"{option} {number} is not from 1 to {_MOST}", reason="BadCommand")
    return number
