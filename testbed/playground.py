"""`make cluster`: a cluster for a person, from the first message to the last trace removed."""

from __future__ import annotations

import os
import select
import shlex
import shutil
import signal
import socket
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from hostprep.errors import FailedError, NotReadyError
from testbed.cache import Say
from testbed.chart import install_chart, wait_for_chart
from testbed.control_plane import ControlPlane, runs
from testbed.node import NodeParts, VirtualNode

LEAVE = b"\x1d"
"""Ctrl-], which leaves, as with telnet; everything else, Ctrl-C too, is for the guest."""
_CHUNK_BYTES = 1 << 14


def open_console(path: Path) -> None:
    """Connect the terminal to the shell behind a socket until Ctrl-] or the machine's end.

    What is piped in is typed as it is, and its end leaves. Raises NotReadyError where nobody
    listens.
    """
    with socket.socket(socket.AF_UNIX) as console:
        try:
            console.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotReadyError(
                "there is no virtual node to enter", remedy="start one with make cluster NODE=1"
            ) from error
        with _raw_terminal() as interactive:
            if interactive:
                size = shutil.get_terminal_size()
                # The console has no way to tell its size; a space keeps it out of the history.
                text = f" stty rows {size.lines} columns {size.columns}; clear\r"
                console.sendall(text.encode())
            _connect(console)


def split_at_leave(data: bytes) -> tuple[bytes, bool]:
    """What was typed before Ctrl-], and whether that came."""
    before, found, _ = data.partition(LEAVE)
    return before, bool(found)


def _connect(console: socket.socket) -> None:
    keys, screen = sys.stdin.fileno(), sys.stdout.fileno()
    while True:
        ready = select.select([keys, console], [], [])[0]
        if console in ready:
            shown = console.recv(_CHUNK_BYTES)
            if not shown:
                return
            os.write(screen, shown)
        if keys in ready:
            typed, leave = split_at_leave(os.read(keys, _CHUNK_BYTES) or LEAVE)
            console.sendall(typed)
            if leave:
                return


@contextmanager
def _raw_terminal() -> Iterator[bool]:
    """Every key goes through at once, as typed; yields whether there is a terminal at all."""
    if not sys.stdin.isatty():
        yield False
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield True
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        print(flush=True)


_REPOSITORY = Path(__file__).parents[1]


class EndedError(Exception):
    """The person wants it to end while it is still starting."""


class Signals:
    """Ctrl-C and its kin: while starting they break off what is under way, later they are a wish.

    Only the first counts: what is removed at the end is removed in peace.
    """

    def __init__(self) -> None:
        self._starting = True
        self._ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        first = not self._ended.is_set()
        self._ended.set()
        if first and self._starting:
            raise EndedError

    def wait(self, timeout_s: float) -> bool:
        """Whether the end was asked for, at the latest after this long."""
        self._starting = False
        return self._ended.wait(timeout_s)


def watch(cluster: ControlPlane, signals: Signals, node: VirtualNode | None = None) -> None:
    """Return when the person wants it to end; raises FailedError when a part ends by itself."""
    while not signals.wait(0.5):
        if not (cluster.etcd.alive and cluster.api_server.alive):
            raise FailedError(f"a server ended:\n{cluster.api_server.tail()}")
        if node is not None and not node.guest.alive:
            raise FailedError(f"the virtual machine ended:\n{node.guest.last_words()}")


@contextmanager
def running_node(cluster: ControlPlane, parts: NodeParts, say: Say) -> Iterator[VirtualNode]:
    """Boot a node for this cluster, with the chart in it; yield when all of it is Ready."""
    start_s = time.monotonic()
    machine = "hardware virtualisation" if parts.qemu.kvm else "emulation: some minutes"
    say(f"booting a virtual machine, by {machine}")
    with parts.node(cluster) as node:
        say(f"  it answers after {time.monotonic() - start_s:.0f} s")
        install_chart(cluster)
        node.wait_ready()
        say(f"  kubelet is Ready after {time.monotonic() - start_s:.0f} s")
        wait_for_chart(cluster)
        say(f"  operator and agent are Ready after {time.monotonic() - start_s:.0f} s")
        yield node


def console_of(folder: Path) -> Path:
    """The socket of a node's console, by the folder of its cluster."""
    return folder / "node" / "console"


def enter_node() -> None:
    """Open a shell in the node that runs on this machine. Raises NotReadyError without one."""
    found = [path for path in map(console_of, runs().alive_folders()) if path.exists()]
    open_console(found[0] if found else console_of(Path("/nonexistent")))


def _settings(kubeconfig: Path, tools: Path) -> str:
    """Lines to paste, wherever that other terminal is."""
    own = os.path.dirname(sys.executable)
    lines = (
        f"cd {shlex.quote(str(_REPOSITORY))}",
        f"export KUBECONFIG={shlex.quote(str(kubeconfig))}",
        f"export PATH={shlex.quote(str(tools))}:{shlex.quote(own)}:$PATH",
    )
    return "\n".join(f"  {line}" for line in lines)


def how_to_use(kubeconfig: Path, tools: Path) -> str:
    """What to type after `make cluster`."""
    return f"""
In another terminal:

{_settings(kubeconfig, tools)}

What to try next:

  python -m testbed node node-a | kubectl create -f -       # this machine, as an object
  helm install hostprep charts/hostprep --no-hooks -n hostprep-system --create-namespace \\
    --set image.registry=localhost
  hostprep-operator run --agent-liveness off &
  hostprep agent --node-name node-a --state-dir /tmp/hostprep-state &
  kubectl apply -f examples/pool.yaml
  kubectl get hmp,hmn,nodes

The whole story: docs/try-cluster.md. Ctrl-C here ends the cluster; what was built is kept.
"""


def how_to_use_a_node(kubeconfig: Path, tools: Path) -> str:
    """What to type after `make cluster NODE=1`."""
    return f"""
In another terminal:

{_settings(kubeconfig, tools)}

What to try next:

  kubectl label node node-a pool.hostprep.dev/kv=true
  kubectl apply -f examples/kubernetes/pool.yaml
  kubectl wait --for=condition=Ready hmp/kv --timeout=3m
  kubectl apply -f examples/kubernetes/namespace.yaml -f examples/kubernetes/engine-scripts.yaml
  kubectl apply -f examples/kubernetes/engine.yaml
  kubectl -n engines rollout status deployment/engine
  kubectl -n engines logs deployment/engine                       # says how long attaching took
  make node-shell                                                 # a shell in the node

The whole story: docs/try-cluster.md. Ctrl-C here ends the cluster; what was built is kept.
"""
