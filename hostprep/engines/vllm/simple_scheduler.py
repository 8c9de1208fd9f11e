"""The scheduler's half: who may use the host tier while the ranks are not all ready."""

from __future__ import annotations

from hostprep.cuda.gate import Gate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from hostprep.cuda.board_view import BoardReader


class TierGate:
    """The gate, and the requests that came before it opened.

    Such a request stays without the host tier until it ends: vLLM counts a request's blocks from
    the first step in which it sees it, and would take later blocks for the first ones, stored
    before they are computed.

    `world` counts all ranks of the engine, on whichever node. The board has those of this node,
    the connector's own messages all of them.
    """

    def __init__(self, world: int, board: BoardReader | None, log: Any) -> None:
        self._log = log
        self._early: set[str] = set()
        self._gate = Gate(world, board, on_degraded=self._log_degraded, on_open=self._log_open)

    @property
    def is_open(self) -> bool:
        """Whether the tier may be used."""
        return self._gate.is_open

    @property
    def is_decided(self) -> bool:
        """Whether the ranks need not report any more."""
        return self._gate.state != "Closed"

    @property
    def why(self) -> str:
        """Why it is not open."""
        return self._gate.why

    def admits(self, request_id: str) -> bool:
        """Tell whether a request may use the tier, now."""
        if self._gate.is_open:
            return request_id not in self._early
        if self._gate.state == "Closed":
            self._early.add(request_id)
        return False

    def forget(self, request_id: str) -> None:
        """Note that a request ended."""
        self._early.discard(request_id)

    def report(self, ranks: Mapping[int, tuple[str, str]]) -> None:
        """Take the states that ranks report: a state, and why."""
        if self.is_decided:
            return
        for rank, (state, reason) in ranks.items():
            self._gate.report(rank, state, reason)

    def close(self) -> None:
        """Stop watching."""
        self._gate.close()

    def _log_open(self) -> None:
        self._log.info("All ranks have registered: the host KV cache is in use")

    def _log_degraded(self, why: str) -> None:
        self._log.warning(
            "Serving from GPU memory alone, without the host KV cache, until the engine is "
            "started again: %s",
            why,
        )
