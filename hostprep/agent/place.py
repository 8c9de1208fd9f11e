"""Being the agent of a node: two locks, and the port; there is one at a time."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from hostprep.agent.settings import Settings
from hostprep.errors import BadInputError
from hostprep.kube.listener import Listener
from hostprep.kube.logs import Logger
from hostprep.node.apply.exclusive import AgentLock

__all__ = ["Place", "take_place"]


@dataclass
class Place:
    """What is held, and when memory was last looked at on the way there."""

    root: AgentLock
    state: int
    listener: Listener
    looked_s: float = 0.0
    """Monotonic; 0 where nobody stood by."""

    def close(self) -> None:
        """Let the next one in."""
        self.listener.close()
        self.root.close()
        os.close(self.state)


async def take_place(settings: Settings, log: Logger) -> Place | None:
    """Become the node's agent, standing by for one that still runs. None where told to end.

    Raises BadInputError (AlreadyRunning) when `settings.wait_s` is over, at once with `once`;
    (CannotListen) where the port cannot be had.
    """
    try:
        return _take(settings)
    except BadInputError as error:
        if error.reason != "AlreadyRunning" or settings.once or settings.wait_s <= 0:
            raise
        from hostprep.agent.standby import Standby  # and with it a server, for those who wait

        return await Standby(settings, log, _take).wait(error)


def _take(settings: Settings, listener: Listener | None = None) -> Place:
    with contextlib.ExitStack() as stack:
        state = settings.lock()
        stack.callback(os.close, state)
        root = AgentLock(settings.root)
        root.hold()
        stack.callback(root.close)
        listener = listener or Listener.open(settings.listen)
        stack.pop_all()
    return Place(root, state, listener)
