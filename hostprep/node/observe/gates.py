"""An engine's gate as the rank board beside its region shows it, for status and the agent."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.client.sidecar import read_sidecar
from hostprep.cuda.board_layout import OPEN, READY, generation_of
from hostprep.cuda.board_view import BoardView, read_board
from hostprep.cuda.gate import Verdict, judge
from hostprep.paths import PoolPaths


@dataclass(frozen=True, slots=True)
class GateFacts:
    """One engine's gate, as its board shows it now."""

    state: str
    """Closed, Open or Degraded."""
    why: str
    is_running: bool
    """One of its ranks lives, or its lease does: a lease all of whose ranks ended is a run too."""
    view: BoardView

    @property
    def is_announced(self) -> bool:
        """Whether the engine's own gate announced it: that is final."""
        return self.view.gate is not None


def observe_gate(paths: PoolPaths, region: str, *, leased: bool) -> GateFacts:
    """Return the gate of the present or last run at a region; changes nothing.

    Raises NotReadyError where there is no board (NoBoard), or none that can be understood
    (BadBoard, OtherBoardVersion), HostprepError.
    """
    view = read_board(paths.board(region))
    verdict = _verdict(view)
    is_running = view.alive or (leased and _is_of_lease(paths, region, view))
    return GateFacts(verdict.state, verdict.why, is_running, view)


def _verdict(view: BoardView) -> Verdict:
    # What the engine's gate announced goes first: it may know of ranks on other nodes.
    if view.gate is not None:
        return Verdict(view.gate.state, view.gate.reason)
    ready = [rank for rank in view.ranks if rank.slot.state == READY]
    if len(ready) == view.world:
        return Verdict(OPEN)  # and stays so: ranks end one by one when the engine does
    return judge(view.world, {}, view)


def _is_of_lease(paths: PoolPaths, region: str, view: BoardView) -> bool:
    sidecar = read_sidecar(paths, region)
    if sidecar is None or not sidecar.lease_id:
        return False
    return generation_of(sidecar.lease_id) == view.generation
