"""A virtual machine under QEMU: boot it, run commands in it, reboot it, cut its power.

It dies with the process that started it, and its disks are thrown away: every start is the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import select
import shlex
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostprep.errors import FailedError
from testbed.cache import cache_folder
from testbed.processes import Child
from testbed.qemu import Qemu

# tsc=reliable: the kernel otherwise reads the time from an emulated device. highres=off: timers go
# by ticks of 4 ms, since each that is set wakes QEMU. Together they are half of an emulated CPU.
_APPEND = (
    "root=/dev/nvme0n1 rw console=ttyS0 panic=-1 quiet mitigations=off nokaslr nowatchdog"
    " random.trust_cpu=on systemd.unified_cgroup_hierarchy=1 systemd.show_status=0"
    " systemd.journald.storage=volatile tsc=reliable highres=off"
)
_MACHINE = "q35,smbus=off,sata=off,usb=off,vmport=off,i8042=off"
_BOOT_SECONDS = 180.0
_LENGTHS = struct.Struct(">II")
_CHUNK_BYTES = 1 << 18
_CONSOLE_TAIL = 4000

Spawn = Callable[[str, Sequence[str]], Child]
"""Starts a named program that dies with us: `ControlPlane.spawn`."""


@contextlib.contextmanager
def virtual_machine_lock() -> Iterator[None]:
    """Wait for other test runs: two machines at once take twice as long each."""
    with open(cache_folder() / "virtual-machine.lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class CommandError(FailedError):
    """A command in the guest failed; its output is in the message."""

    def __init__(self, command: str, exit_code: int, output: str) -> None:
        super().__init__(f"in the virtual machine, `{command}` ended with {exit_code}:\n{output}")
        self.exit_code = exit_code
        self.output = output


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What the machine is made of. Each NUMA node is a socket of its own, as its kernel expects."""

    processors: int = 2
    nodes_mib: tuple[int, ...] = (2048, 2048)
    """Memory of each NUMA node."""
    append: str = ""
    """More of the kernel's command line."""

    def flags(self) -> list[str]:
        """QEMU's flags for processors, memory and NUMA."""
        nodes = len(self.nodes_mib)
        flags = ["-smp", f"{self.processors},sockets={nodes}", "-m", f"{sum(self.nodes_mib)}M"]
        for node, size_mib in enumerate(self.nodes_mib):
            own = "".join(f",cpus={cpu}" for cpu in range(node, self.processors, nodes))
            flags += ["-object", f"memory-backend-ram,id=m{node},size={size_mib}M"]
            flags += ["-numa", f"node,nodeid={node},memdev=m{node}{own}"]
        return flags


class Guest:
    """One machine. One command at a time runs in it."""

    def __init__(
        self,
        *,
        qemu: Qemu,
        kernel: Path,
        disks: Sequence[Path],
        folder: Path,
        hardware: Hardware,
        forwards: Mapping[int, int],
    ) -> None:
        """`disks`: the first is the root, the others have labels; `folder`: for sockets and the
        console's log; `forwards`: ports of this machine's loopback to ports of the guest.
        """
        self._qemu = qemu
        self._kernel = kernel
        self._disks = list(disks)
        self._folder = folder
        self._hardware = hardware
        self._forwards = dict(forwards)
        self._count = 0
        self.boot_id = ""
        """Identity of the present boot, as the guest's kernel names it."""

    @property
    def alive(self) -> bool:
        """Whether it is still switched on."""
        return self._process.alive

    @property
    def console(self) -> Path:
        """Socket of a shell in the guest, for people."""
        return self._folder / "console"

    def start(self, spawn: Spawn) -> None:
        """Start QEMU and wait until the guest answers. Raises FailedError with its last words."""
        self._folder.mkdir(exist_ok=True)
        self._process = spawn("qemu", self._command())
        deadline_s = time.monotonic() + _BOOT_SECONDS
        self._socket = socket.socket(socket.AF_UNIX)
        while True:
            self._check_alive()
            try:
                self._socket.connect(str(self._folder / "channel"))
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(0.02)
            else:
                break
        self._hello(deadline_s)

    def stop(self) -> None:
        """Switch it off at once: there is nothing on its disks to keep."""
        self._process.kill()
        self._socket.close()

    def execute(
        self, command: str, *, stdin: bytes = b"", timeout_s: float = 120.0
    ) -> tuple[int, str]:
        """Run a shell command as root; returns its exit status and all it printed, in order.

        124 means that it was killed after `timeout_s`. What shall outlive it is for systemd-run.
        Raises FailedError when the guest reboots or hangs meanwhile.
        """
        self._count += 1
        head = {"id": self._count, "argv": ["/bin/bash", "-c", command], "timeout_s": timeout_s}
        self._send(head, stdin)
        while True:
            answer, output = self._receive(time.monotonic() + timeout_s + 60.0)
            if "hello" in answer:
                raise FailedError(f"the virtual machine rebooted during `{command}`")
            if answer.get("id") == self._count:
                return answer["exit_code"], output.decode("utf-8", "replace")

    def run(self, command: str, *, stdin: bytes = b"", timeout_s: float = 120.0) -> str:
        """Run a shell command as `execute` does, return what it printed. Raises CommandError."""
        exit_code, output = self.execute(command, stdin=stdin, timeout_s=timeout_s)
        if exit_code != 0:
            raise CommandError(command, exit_code, output)
        return output

    def write(self, path: str, content: str | bytes, *, mode: str = "0644") -> None:
        """Make a file in the guest, and the folders above it."""
        data = content.encode() if isinstance(content, str) else content
        name = shlex.quote(path)
        self.run(f"mkdir -p $(dirname {name}); cat > {name}; chmod {mode} {name}", stdin=data)

    def reboot(self) -> None:
        """An orderly reboot; returns when the guest answers again."""
        self._restart("systemctl reboot")

    def power_cut(self) -> None:
        """Restart without a word to any program, and without writing what was not yet on disk."""
        self._restart("echo b > /proc/sysrq-trigger")

    def await_reboot(self, *, timeout_s: float = _BOOT_SECONDS) -> None:
        """Wait for the end of a reboot that something in the guest has begun."""
        before = self.boot_id
        deadline_s = time.monotonic() + timeout_s
        while self.boot_id == before:
            self._hello(deadline_s)

    def _restart(self, command: str) -> None:
        head = {"id": 0, "argv": ["/bin/bash", "-c", command], "timeout_s": 30}
        self._send(head, b"")
        self.await_reboot()

    def _command(self) -> list[str]:
        command = [*self._qemu.command, "-nodefaults", "-no-user-config", "-display", "none"]
        command += ["-machine", _MACHINE, *self._qemu.processor, *self._hardware.flags()]
        command += ["-kernel", str(self._kernel)]
        command += ["-append", f"{_APPEND} {self._hardware.append}".strip()]
        for number, disk in enumerate(self._disks):
            # snapshot=on: the file stays as it is; what the guest writes goes with QEMU.
            drive = f"if=none,id=d{number},format=raw,snapshot=on,cache=unsafe,file={disk}"
            command += ["-drive", drive]
            # One NVMe disk only, the root: the kernel numbers several in any order. The others are
            # found by their labels.
            kind = "virtio-blk-pci" if number else "nvme"
            command += ["-device", f"{kind},serial=d{number},drive=d{number}"]
        forwards = "".join(f",hostfwd=tcp:127.0.0.1:{h}-:{g}" for h, g in self._forwards.items())
        command += ["-netdev", f"user,id=n0{forwards}"]
        command += ["-device", "virtio-net-pci,netdev=n0,romfile="]
        command += ["-serial", f"file:{self._folder}/console.log", "-device", "virtio-serial-pci"]
        for name, device in (
            ("channel", "virtserialport,chardev=channel,name=hostprep.channel"),
            ("console", "virtconsole,chardev=console"),
        ):
            path = self._folder / name
            command += ["-chardev", f"socket,id={name},path={path},server=on,wait=off"]
            command += ["-device", device]
        return command

    # What goes over the channel: testbed/modules/channel has the other side.

    def _hello(self, deadline_s: float) -> None:
        answer, _ = self._receive(deadline_s)
        if "hello" in answer:
            self.boot_id = answer["hello"]

    def _send(self, head: Mapping[str, object], payload: bytes) -> None:
        text = json.dumps(head).encode()
        self._socket.sendall(_LENGTHS.pack(len(text), len(payload)) + text + payload)

    def _receive(self, deadline_s: float) -> tuple[dict[str, Any], bytes]:
        head_bytes, payload_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size, deadline_s))
        head = json.loads(self._read(head_bytes, deadline_s))
        return head, self._read(payload_bytes, deadline_s)

    def _read(self, size_bytes: int, deadline_s: float) -> bytes:
        data = bytearray()
        while len(data) < size_bytes:
            if time.monotonic() > deadline_s:
                raise FailedError(f"the virtual machine does not answer:\n{self.last_words()}")
            if not select.select([self._socket], [], [], 1.0)[0]:
                self._check_alive()
                continue
            chunk = self._socket.recv(min(_CHUNK_BYTES, size_bytes - len(data)))
            if not chunk:
                raise FailedError(f"the virtual machine hung up:\n{self.last_words()}")
            data += chunk
        return bytes(data)

    def last_words(self) -> str:
        """The end of the kernel's console, and what QEMU itself said."""
        log = self._folder / "console.log"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return f"{text[-_CONSOLE_TAIL:]}\n{self._process.tail(5)}"

    def _check_alive(self) -> None:
        if not self._process.alive:
            raise FailedError(f"QEMU ended with {self._process.returncode}:\n{self.last_words()}")
