"""A root of its own for each demo: removed at its end, or by the next demo after a kill.

A running demo holds a flock on its root. Huge pages are the machine's: a plan takes those that lie
free, whoever added them, so two demos could take each other's before they are mapped. Hence they
take turns to prepare and to give back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from hostprep.console import warn
from hostprep.errors import BusyError, HostprepError
from hostprep.linux.files import closing_fd, from_os_error, open_folder
from hostprep.linux.locks import hold_lock, try_lock
from hostprep.node.apply.exclusive import exclusive
from hostprep.node.apply.service import Node
from hostprep.node.observe.pools import observe_pools

_PREFIX = "hostprep-demo"
_SAY_AFTER_S = 0.5
_PREPARE_TIMEOUT_S = 600.0
_GIVE_BACK_TIMEOUT_S = 60.0

_Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextlib.contextmanager
def demo_node() -> Iterator[Node]:
    """Yield the machine with a new root, from which everything is given back at the end.

    Also at the end by SIGTERM or SIGHUP, which are KeyboardInterrupt here. What killed demos left
    is given back before.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_handling(signal.default_int_handler, signal.SIGTERM, signal.SIGHUP))
        with turn():
            _clear_leftovers()
            root = _make_root()
            lock = stack.enter_context(closing_fd(open_folder(root)))
            try_lock(lock, exclusive=True)
            stack.callback(_give_back_undisturbed, root)
        yield Node(root)


@contextlib.contextmanager
def turn(timeout_s: float = _PREPARE_TIMEOUT_S) -> Iterator[None]:
    """Be the only demo that takes huge pages or gives them back. Raises BusyError."""
    busy = BusyError(
        "another demo prepares its memory, or gives it back",
        reason="AlreadyRunning",
        remedy="wait for it to end",
    )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(_parent(), timeout_s=_SAY_AFTER_S, busy=busy))
        except BusyError:
            warn(f"demo: waits: {busy.message}")
            stack.enter_context(hold_lock(_parent(), timeout_s=timeout_s, busy=busy))
        yield


def _parent() -> str:
    """Return the folder of all demos' roots, which is locked for a turn: it leaves no file."""
    return os.path.realpath("/run" if os.geteuid() == 0 else "/dev/shm")  # noqa: S108


def _make_root() -> str:
    try:
        return tempfile.mkdtemp(prefix=f"{_PREFIX}-{os.getpid()}-", dir=_parent())
    except OSError as error:
        raise from_os_error(error, f"create a folder in {_parent()}") from error


def _clear_leftovers() -> None:
    """Give back what killed demos left: their locks are free. One that cannot be is told."""
    for name in os.listdir(_parent()):
        # An earlier release had one root for all demos, by the prefix alone.
        if name != _PREFIX and not name.startswith(f"{_PREFIX}-"):
            continue
        root = f"{_parent()}/{name}"
        try:
            with closing_fd(open_folder(root)) as lock:
                if os.fstat(lock).st_uid == os.geteuid() and try_lock(lock, exclusive=True):
                    _give_back(root)
        except (HostprepError, OSError) as error:
            warn(f"demo: what is left at {root} cannot be cleared away: {error}")


def _give_back_undisturbed(root: str) -> None:
    """Give everything back, whoever presses Ctrl-C a second time."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_handling(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
        with contextlib.suppress(BusyError):  # giving back out of turn costs another demo time
            stack.enter_context(turn(_GIVE_BACK_TIMEOUT_S))
        _give_back(root)


def _give_back(root: str) -> None:
    node = Node(root)
    pools = [pool.name for pool in observe_pools(root)]
    if pools:
        node.release(pools, force=True)
    else:  # only what is beside the pools, and what a killed run was making
        with exclusive(root, wait_timeout_s=_GIVE_BACK_TIMEOUT_S, on_wait=lambda _: None):
            node.clear_if_empty()
    try:
        os.rmdir(root)
    except FileNotFoundError:
        return
    except OSError as error:
        raise from_os_error(error, f"remove {root}") from error


@contextlib.contextmanager
def _handling(handler: _Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals so while the block runs; one that is ignored (by nohup, say) stays so."""
    before = [(number, signal.getsignal(number)) for number in numbers]
    before = [(number, former) for number, former in before if former is not signal.SIG_IGN]
    for number, _ in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before:
            signal.signal(number, former)
