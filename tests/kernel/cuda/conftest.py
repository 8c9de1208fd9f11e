"""What tests of the turnstile and the rank board begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostprep.cuda.turnstile_files import make_turnstiles


@pytest.fixture
def root(memory_folder: Path) -> Path:
    """Return a root with its turnstile, which every user may look into."""
    memory_folder.chmod(0o755)
    make_turnstiles(str(memory_folder))
    return memory_folder


@pytest.fixture
def path(memory_folder: Path) -> str:
    """Return where a board may be made."""
    memory_folder.chmod(0o755)
    return str(memory_folder / "board")
