"""An agent's start, in order: what its worker waits for comes before everything else.

Most of a start is Python reading modules. So no more of them are read than it takes to

1. start a worker (`supervisor.early_worker`), which reads its own meanwhile,
2. check the settings, become the node's agent and open the port: bad input ends here,
3. ask the API server what this node is to hold,
4. tell the worker, which populates for seconds from then on;

and only then `hostprep.agent.loop` and all that it needs: the server behind the port, metrics,
the device plugins, the log. What fails on the way to 4 is left to the loop, which meets it again
and says it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import gc
from asyncio.subprocess import Process
from dataclasses import dataclass

from hostprep.agent.desired import Desire, wanted_of
from hostprep.agent.messages import Round
from hostprep.agent.node_api import NodeApi, Observed
from hostprep.agent.place import Place, take_place
from hostprep.agent.saving import Saver
from hostprep.agent.settings import Settings
from hostprep.agent.supervisor import send
from hostprep.errors import BadInputError, HostprepError
from hostprep.kube.logs import Logger

__all__ = ["Beginning", "start"]

_API_PATIENCE_S = 1.0
"""For the first answer, before the rest is read: kubelet wants an answer from us as well."""


@dataclass
class Beginning:
    """What is there when the rest has yet to be read."""

    settings: Settings
    log: Logger
    worker: Process
    boot_id: str
    place: Place
    saver: Saver
    api: NodeApi | None
    """None without an API server to ask."""
    first: Observed | None = None
    """What the API server said to begin with, if it did."""
    version: str | None = None
    """To watch from, with `first`."""
    instructed_at: str = ""
    """UTC, ISO 8601: when the worker was told; empty where that is left to the loop."""


async def start(settings: Settings, log: Logger, worker: Process) -> int:
    """Run until SIGTERM, or with `once` until all is done. Returns the exit code.

    `worker` was started beforehand, for `settings.root`, and is taken over. Raises BadInputError
    for settings that cannot be, before anything is changed.
    """
    gc.freeze()
    gc.enable()
    boot_id = settings.check()
    place = await take_place(settings, log)
    if place is None:
        return 0
    api = None
    try:
        saver = Saver(settings.state_dir, log)
        api = await _api(settings, saver, log)
        beginning = Beginning(settings, log, worker, boot_id, place, saver, api)
        await _instruct(beginning)
        from hostprep.agent.loop import run

        return await run(beginning)
    finally:
        if api is not None:
            await api.close()
        place.close()


async def _api(settings: Settings, saver: Saver, log: Logger) -> NodeApi | None:
    saved = saver.read()
    api = await NodeApi.connect(settings.node_name, settings.kubeconfig, log)
    if api is None and saved is None:
        raise BadInputError(
            "there is no API server to ask, and nothing was saved of an earlier run",
            reason="NoInstruction",
            remedy="give --kubeconfig, or run it in a pod; without a cluster use"
            " `hostprep prepare`",
        )
    return api


async def _instruct(beginning: Beginning) -> None:
    """Tell the worker what the API server says, if it says something that can be done."""
    if beginning.api is None:
        return
    try:
        answer = await asyncio.wait_for(beginning.api.ask(), _API_PATIENCE_S)
        beginning.first, beginning.version = answer
        document = beginning.first.document
        if document is None:
            return
        desire = Desire.of_object(document, boot_id=beginning.boot_id)
        # About to make something, it is the one to make the root: two might otherwise.
        makes = any(not entry.absent for entry in desire.entries)
        beginning.place.root.hold(make_root=makes)
    except (TimeoutError, HostprepError):
        return
    beginning.saver.keep(desire)
    # A number that no request of the loop has: it asks again for itself, with the same wishes.
    await send(beginning.worker, Round(number=0, wanted=wanted_of(desire).wanted))
    beginning.instructed_at = dt.datetime.now(dt.UTC).isoformat()
