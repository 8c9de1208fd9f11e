"""Regions on four NUMA nodes are populated side by side, every page on its node.

On a virtual machine of its own, without kubelet: the command line, out of the image.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator

import pytest

from testbed.container_images import our_image
from testbed.control_plane import runs
from testbed.image_store import NAMESPACE
from testbed.node import NodeParts
from testbed.processes import Child
from testbed.virtual_machine import Guest, Hardware, virtual_machine_lock

pytestmark = [pytest.mark.node, pytest.mark.timeout(600)]

_HOSTPREP = "/opt/hostprep/bin/hostprep"
_NODES = 4
_MIB_PER_NODE = 512
_PAGE_BYTES = {"HugeTLB2Mi": 2 << 20, "Base": 4096}
# Runs a command, and prints what each node holds of huge pages in use and of shared memory, in
# bytes, as often as it can meanwhile.
_SAMPLE = """
import json, subprocess, sys, time

def held(node):
    folder = f"/sys/devices/system/node/node{node}"
    pages = f"{folder}/hugepages/hugepages-2048kB"
    total, free = (int(open(f"{pages}/{name}_hugepages").read()) for name in ("nr", "free"))
    lines = open(f"{folder}/meminfo").read().splitlines()
    shared = next(int(line.split()[3]) for line in lines if " Shmem:" in line)
    return ((total - free) << 21) + (shared << 10)

samples = []
with open("/tmp/prepare.log", "w") as log:
    child = subprocess.Popen(sys.argv[2:], stdout=log, stderr=log)
    while child.poll() is None:
        samples.append([held(node) for node in range(int(sys.argv[1]))])
        time.sleep(0.005)
if child.returncode:
    sys.exit(open("/tmp/prepare.log").read())
print(json.dumps(samples))
"""
# Maps a region, and prints the pages that numa_maps counts on each node, and their size.
_WHERE = """
import json, mmap, os, re, sys
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, 0)
memory.madvise(22)  # MADV_POPULATE_READ
line = next(line for line in open("/proc/self/numa_maps") if sys.argv[1] in line)
print(json.dumps({node: int(count) for node, count in re.findall(r" N(\\d+)=(\\d+)", line)}))
"""


class _Machine:
    """The guest, and our image in it."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def unpack_image(self) -> None:
        """Have the image's files where its programs see the guest's own memory and processes."""
        self._guest.run(
            "systemd-run --unit=images containerd --config /etc/containerd/config.toml && "
            f"mkdir /mnt/image && until ctr version > /dev/null 2>&1; do sleep 0.2; done && "
            f"ctr -n {NAMESPACE} images mount --rw {our_image()} /mnt/image && cd /mnt/image && "
            "for each in proc sys dev run tmp; do mount --rbind /$each $each; done"
        )

    def run(self, *command: str) -> str:
        """Run a program of the image, return what it printed."""
        return self._guest.run(f"chroot /mnt/image {shlex.join(command)}", timeout_s=300)


@pytest.fixture(scope="module")
def machine(parts: NodeParts) -> Iterator[_Machine]:
    """Four sockets with a processor and memory each. Without a cluster no unit of its starts."""
    run = runs().begin()
    guest = Guest(
        qemu=parts.qemu,
        kernel=parts.image.kernel,
        disks=[parts.image.root, parts.store],
        folder=run.folder / "node",
        hardware=Hardware(processors=_NODES, nodes_mib=(2 * _MIB_PER_NODE + 256,) * _NODES),
        forwards={},
    )
    log = run.folder / "qemu.log"
    with virtual_machine_lock():
        try:
            guest.start(lambda name, command: Child(name, command, run=run.name, log=log))
            found = _Machine(guest)
            found.unpack_image()
            yield found
        finally:
            run.release()


@pytest.mark.parametrize("backing", _PAGE_BYTES)
def test_lanes_run_side_by_side_and_every_page_lies_on_its_node(
    machine: _Machine, backing: str
) -> None:
    options = (f"--size={_NODES * _MIB_PER_NODE}Mi", f"--backing={backing}", "--reserve=64Mi")
    prepare = (_HOSTPREP, "prepare", "kv", *options, "--progress=none")
    samples: list[list[int]] = json.loads(
        machine.run("python3", "-c", _SAMPLE, str(_NODES), *prepare)
    )
    try:
        size = _MIB_PER_NODE << 20
        gained = [
            [now - was for now, was in zip(sample, samples[0], strict=True)] for sample in samples
        ]
        at_once = [sum(size // 50 < got < size * 49 // 50 for got in each) for each in gained]
        print(f"samples by how many nodes are between begin and end: {Counter(at_once)}")
        assert max(at_once) == _NODES

        for node in range(_NODES):
            path = f"/run/hostprep/kv/mem/node{node}-0"
            pages = json.loads(machine.run("python3", "-c", _WHERE, path))
            assert pages == {str(node): size // _PAGE_BYTES[backing]}
    finally:
        machine.run(_HOSTPREP, "release", "kv")
