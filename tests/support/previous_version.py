"""The state that version 0.1.0 left (tests/fixtures/state_v0_1), laid out on this machine.

Small files are copied with this boot's id, and this machine's devices and inodes in place of those
of the machine that they were made on. Knows files, locks and mounts, and none of our modules:
whatever the present version is, this is what it finds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).parents[1] / "fixtures" / "state_v0_1"
ZIPAPP = FIXTURE / "hostprep.pyz"
"""The previous version's engine half itself."""
GID = 4242
TOKEN = "a token of the previous version"
IDENTITY = {"model": "llama-3.1-8b", "kv_dtype": "fp8"}
HUGE_PAGE_BYTES = 2 << 20
BOOT_ID: str = json.loads((FIXTURE / "root/kv/agent.json").read_text())["boot_id"]
LEASE_ID: str = json.loads((FIXTURE / "root/kv/state/node0-1/lease").read_text())["lease_id"]
_PAGES = Path("/sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages")


def this_boot() -> str:
    """Return this boot's id."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def copy_state(folder: Path) -> Path:
    """Copy the fixture as it is, but for the large program; return the copy of the pools' root."""
    shutil.copytree(FIXTURE, folder, dirs_exist_ok=True, ignore=lambda *_: [ZIPAPP.name])
    return folder / "root"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock, as a living process of the previous version does."""
    with open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@dataclass
class PreviousNode:
    """This machine with some of the previous version's pools."""

    root: Path
    pages_before: int

    def region(self, pool: str, name: str) -> Path:
        """Return a region's file."""
        return self.root / pool / "mem" / name

    def file_ids(self, pool: str) -> dict[str, tuple[int, int]]:
        """Return device and inode of each region there is now."""
        found = sorted((self.root / pool / "mem").iterdir())
        return {path.name: (path.stat().st_dev, path.stat().st_ino) for path in found}

    def content(self, pool: str, name: str) -> set[int]:
        """Return which bytes occur in a region."""
        with open(self.region(pool, name), "rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            with mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ) as memory:
                return set(memory[:])

    def huge_pages(self) -> int:
        """Return how many huge pages there are, less those that were there before."""
        return int(_PAGES.read_text()) - self.pages_before

    def add_huge_pages(self, pages: int) -> None:
        """Reserve that many more, as the previous version had."""
        wanted = int(_PAGES.read_text()) + pages
        _PAGES.write_text(str(wanted))
        assert int(_PAGES.read_text()) == wanted, "this machine has no huge pages to give"

    def lay_out(self, *pools: str) -> None:
        """Make the pools' folders, mounts, populated regions and small files."""
        tree = json.loads((FIXTURE / "tree.json").read_text())
        mounts = {mount["path"]: mount for mount in tree["mounts"]}
        entries = [
            entry
            for entry in tree["entries"]
            if entry["path"].partition("/")[0] in ("", "turnstile", *pools)
            or (entry["type"] == "file" and "/" not in entry["path"])
        ]
        for entry in entries:
            if entry["type"] != "file":
                self._make(entry, mounts.get(entry["path"]))
        ids: dict[str, dict[str, int]] = {}
        for entry in entries:
            if "st_ino" in entry:
                pool = entry["path"].partition("/")[0]
                new = self._populate(entry)
                for kind in ("st_dev", "st_ino"):
                    ids.setdefault(f"{pool} {kind}", {})[str(entry[kind])] = new[kind]
        for entry in entries:
            if entry["type"] == "file" and "st_ino" not in entry:
                self._write(entry, ids)

    def _make(self, entry: dict[str, Any], mount: dict[str, str] | None) -> None:
        path = self.root / entry["path"]
        if entry["type"] == "link":
            os.symlink(entry["target"], path)
            return
        path.mkdir(exist_ok=True)
        if mount is not None:
            kind = ("-t", mount["fs_type"], "-o", mount["options"])
            subprocess.run(["mount", *kind, "hostprep", str(path)], check=True)
        _give_access(path, entry)

    def _populate(self, entry: dict[str, Any]) -> dict[str, int]:
        path = self.root / entry["path"]
        if "pagesize=" in _options_of(path.parent):
            self.add_huge_pages(entry["size_bytes"] // HUGE_PAGE_BYTES)
        with open(path, "x+b") as file:
            os.ftruncate(file.fileno(), entry["size_bytes"])
            with mmap.mmap(file.fileno(), entry["size_bytes"]) as memory:
                memory[:] = entry["all_bytes"].encode() * entry["size_bytes"]
        _give_access(path, entry)
        return {"st_dev": path.stat().st_dev, "st_ino": path.stat().st_ino}

    def _write(self, entry: dict[str, Any], ids: dict[str, dict[str, int]]) -> None:
        path = self.root / entry["path"]
        if path.name == ZIPAPP.name:
            shutil.copyfile(ZIPAPP, path)
        else:
            data = (FIXTURE / "root" / entry["path"]).read_bytes()
            data = data.replace(BOOT_ID.encode(), this_boot().encode())
            pool = entry["path"].partition("/")[0]

            def here(match: re.Match[bytes]) -> bytes:
                number = ids[f"{pool} {match[1].decode()}"][match[2].decode()]
                return b'"%b": %d' % (match[1], number)

            path.write_bytes(re.sub(rb'"(st_dev|st_ino)": (\d+)', here, data))
        _give_access(path, entry)


def _options_of(mounted: Path) -> str:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    [line] = [line for line in lines if line.split()[4] == str(mounted)]
    return line.split()[-1]


def _give_access(path: Path, entry: dict[str, Any]) -> None:
    os.chown(path, 0, entry["gid"])
    path.chmod(int(entry["mode"], 8))


@contextlib.contextmanager
def previous_node() -> Iterator[PreviousNode]:
    """Yield this machine with an empty root; takes all away afterwards, whatever is left there.

    While holding the machine's lock.
    """
    folder = Path(tempfile.mkdtemp(prefix="hostprep-test-", dir="/dev/shm"))
    node = PreviousNode(folder / "root", int(_PAGES.read_text()))
    try:
        yield node
    finally:
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if line.split()[4].startswith(f"{folder}/"):
                subprocess.run(["umount", "-l", line.split()[4]], check=False)
        _PAGES.write_text(str(node.pages_before))
        shutil.rmtree(folder, ignore_errors=True)


class OldEngine:
    """An engine of the previous version that leases `kv`'s region node0-1, as the kernel sees it.

    A process that has the region open, mapped and locked, and is named beside it: as its leader,
    and, by the users lock, as a rank that joined.
    """

    _CODE = """
import fcntl, mmap, os, sys, time
region = os.open(sys.argv[1], os.O_RDWR)
users = os.open(sys.argv[2], os.O_RDWR)
fcntl.flock(region, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
memory = mmap.mmap(region, os.fstat(region).st_size)
print("holds", flush=True)
for line in sys.stdin:
    memory[0] = memory[1] = ord(line[0])
    print(chr(memory[0]), flush=True)
"""

    def __init__(self, node: PreviousNode) -> None:
        self._node = node
        state = node.root / "kv/state/node0-1"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", self._CODE, str(node.region("kv", "node0-1")),
             str(state / "users")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "holds\n"
        self._sign(state)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _sign(self, state: Path) -> None:
        """Put this process in the place of the one that the files name."""
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        start_ticks = int(stat.rpartition(")")[2].split()[19])
        namespace = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        lease = json.loads((state / "lease").read_text())
        old = (lease["pid"], lease["start_ticks"], lease["pid_namespace"])
        lease |= {"pid": self.pid, "start_ticks": start_ticks, "pid_namespace": namespace}
        (state / "lease").write_text(json.dumps(lease))
        members = (state / "users").read_text()
        line = "+ {} {} {}\n"
        assert line.format(*old) in members
        new = line.format(self.pid, start_ticks, namespace)
        (state / "users").write_text(members.replace(line.format(*old), new))

    def write(self, letter: str) -> str:
        """Have it write to its memory, and tell what it reads there."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(letter, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def holds_its_lease(self) -> bool:
        """Tell whether anybody else is kept out, by lock, of region and users lock."""
        users = self._node.root / "kv/state/node0-1/users"
        return _is_locked(self._node.region("kv", "node0-1")) and _is_locked(users)

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.communicate()


def _is_locked(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
