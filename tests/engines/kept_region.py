"""What an engine of vLLM left in a region, read from outside: records, and the bytes they name.

The directory is docs/directory.md's; where a chunk's bytes lie is what the engine's identity says.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hostprep.slots import Directory, Group, Layout

_KEY_BYTES = 36
_HEADER_BYTES = 65_536
_IDENTITY_AT = 4096
_OTHER = 0.1
"""Two computations of a block differ in rounding, at most some hundredths of its largest value;
two blocks differ by all of it."""


@dataclass(frozen=True)
class KeptRegion:
    """The records of one moment."""

    chunks: int
    """How many there is room for."""
    blocks: dict[bytes, tuple[int, bytes]]
    """By key: the chunk's number, and what lies there, of all ranks."""
    writing: list[int]
    """Chunks that were being written."""

    @classmethod
    def read(cls, path: Path) -> KeptRegion:
        """Read it while no engine writes. Raises AssertionError for a directory that is none."""
        content = path.read_bytes()
        header = content[-_HEADER_BYTES:]
        length = int.from_bytes(header[36:40], "little")
        identity = json.loads(header[_IDENTITY_AT : _IDENTITY_AT + length] or b"{}")
        rows, row_bytes, slices, slice_bytes = (
            int(identity[f"layout.{name}"])
            for name in ("rows", "row_bytes", "slices", "slice_bytes")
        )
        layout = Layout(1, (Group("chunks", rows, row_bytes),))
        size_bytes = Directory.size_bytes_for(rows, _KEY_BYTES)
        found = Directory(
            memoryview(bytearray(content[-size_bytes:])), layout, key_bytes=_KEY_BYTES
        )
        assert found.problem is None
        (kept,) = found.read()

        def bytes_of(chunk: int) -> bytes:
            begins = [part * slice_bytes + chunk * row_bytes for part in range(slices)]
            return b"".join(content[begin : begin + row_bytes] for begin in begins)

        blocks = {key: (chunk, bytes_of(chunk)) for key, chunk in kept.slots.items()}
        return cls(rows, blocks, kept.writing)

    def check(self, before: dict[bytes, bytes]) -> None:
        """Assert that each block is what it was when it was first seen, but for rounding.

        `before`: by key, what was seen; new ones are added.
        """
        for key, (chunk, content) in self.blocks.items():
            seen, now = _values(before.setdefault(key, content)), _values(content)
            assert np.any(seen), f"chunk {chunk} has nothing"
            off = float(np.max(np.abs(seen - now))) / float(np.max(np.abs(seen)))
            assert off < _OTHER, f"chunk {chunk} has another block's bytes, by {off:.3f}"


def _values(content: bytes) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return bfloat16 values: each is the upper half of a float32."""
    return (np.frombuffer(content, "<u2").astype(np.uint32) << 16).view(np.float32)
