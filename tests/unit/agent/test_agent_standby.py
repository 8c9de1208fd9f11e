"""Standing by: a look that fails is said, and the next one counts."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from hostprep.agent.instance import acquire_instance_lock, lock_state_dir
from hostprep.agent.settings import Settings
from hostprep.kube.logs import make_logger, set_up_logs

pytestmark = pytest.mark.unit


def test_a_look_that_fails_is_said_and_the_next_one_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(
        node_name="a",
        root=str(tmp_path / "root"),
        state_dir=str(tmp_path),
        listen="127.0.0.1:0",
        verify_interval_s=0.1,
        wait_s=60,
    )
    Path(settings.root).write_text("a file, where nothing can be looked at")
    old = lock_state_dir(settings.state_dir)

    async def stand_by() -> float:
        set_up_logs(style="json", level="info")
        standing = asyncio.create_task(acquire_instance_lock(settings, make_logger("agent")))
        said = ""
        while said.count("cannot_look") < 2:
            await asyncio.sleep(0.05)
            said += capsys.readouterr().err
        os.unlink(settings.root)
        await asyncio.sleep(0.5)
        os.close(old)
        place = await standing
        assert place is not None
        place.close()
        return place.observed_s

    observed_s = asyncio.run(asyncio.wait_for(stand_by(), 60))
    assert observed_s > 0
