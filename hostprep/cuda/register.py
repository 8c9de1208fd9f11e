"""The call that engines make."""

from __future__ import annotations

from hostprep.client.attachment import Attachment
from hostprep.cuda.registration import Registration
from hostprep.cuda.slices import pool_of
from hostprep.cuda.turnstile import Turnstile, patience_for
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypedDict, Unpack

    from hostprep.cuda.chunks import ChunkPolicy
    from hostprep.cuda.driver import Driver
    from hostprep.cuda.job import Turns
    from hostprep.cuda.listeners import Board
    from hostprep.cuda.progress import Progress

    class Options(TypedDict, total=False):
        """What Registration takes; see there."""

        driver: Driver | None
        context: int | None
        offset_bytes: int
        size_bytes: int | None
        row_bytes: int
        turnstile: Turns | None
        deadline_s: float | None
        on_registered: Callable[[], object] | None
        on_progress: Callable[[Progress], object] | None
        board: Board | None
        policy: ChunkPolicy | None


__all__ = ["register"]


def register(
    attachment: Attachment, *, mode: str = "background", **options: Unpack[Options]
) -> Registration:
    """Register an attachment, or a slice of it, with CUDA; return the Registration at work on it.

    `mode="background"` returns within a millisecond of having the driver, `mode="sync"` once all
    is registered, and raises what went wrong, as engines do by themselves. The options are those
    of Registration; without `turnstile` it takes turns at the node's, with None at none. Close
    the Registration before the engine lets go of the memory.
    """
    if mode not in ("background", "sync"):
        raise BadInputError(
            f"mode {mode!r} is unknown", reason="BadMode", remedy="give background or sync"
        )
    if "turnstile" not in options:
        # No chunk ends inside a row: a row that is all of a rank's part is one long call.
        patience = patience_for(options.get("row_bytes", 0))
        options["turnstile"] = Turnstile(pool_of(attachment).root, patience_s=patience)
    registration = Registration(attachment, **options)
    return registration.run() if mode == "sync" else registration.start()
