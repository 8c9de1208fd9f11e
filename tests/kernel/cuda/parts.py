"""What the tests of registrations share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hostprep.backing import MIB, Backing
from hostprep.client.attach import Attachment
from hostprep.cuda.board_layout import Holes
from hostprep.cuda.chunks import ChunkPolicy
from hostprep.register import Registration
from testbed.standin.children import Scene

ONE_MIB = ChunkPolicy(first_bytes=MIB, least_bytes=MIB, most_bytes=MIB)
LONG_S = 60.0
"""A hang, whatever the machine."""


class Notes:
    """A rank's board that writes down what it is told."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.told: list[str] = []
        self.bytes: list[int] = []
        self.holes: Holes = ()
        self._breaks = breaks

    def initializing(self) -> None:
        self.told.append("INITIALIZING")

    def progress(
        self,
        done_bytes: int,
        size_bytes: int,
        longest_chunk_s: float = 0.0,
        holes: Holes = (),
    ) -> None:
        self.holes = holes
        self.bytes.append(done_bytes)

    def ready(self) -> None:
        if self._breaks:
            raise OSError("the board's file is gone")
        self.told.append("READY")

    def failed(self, reason: str) -> None:
        self.told.append(f"FAILED {reason}")


def registration_of(
    scene: Scene, mib: int = 8, backing: Backing = Backing.BASE, **options: Any
) -> tuple[Attachment, Registration]:
    """Return an attachment, and a registration of it in chunks of 1 MiB, yet to be started."""
    scene.context()
    attachment = scene.attachment(mib, backing=backing)
    return attachment, Registration(attachment, **{"policy": ONE_MIB, **options})


def is_mapped(address: int) -> bool:
    """Tell whether this process has a mapping that begins there."""
    return f"{address:x}-" in Path("/proc/self/maps").read_text("ascii")
