"""QEMU for the virtual machine: the machine's own where it is new enough, else Debian's backport.

QEMU 7.2 loses a two-processor guest with Linux 6.12 now and then (a double fault, a hang, half a
minute before the clock starts); 10.0 never did in the same tests.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hostprep.errors import FailedError
from testbed.apt import Source, download_packages, install_packages, mirror, release
from testbed.cache import Say, install

_PROGRAM = "qemu-system-x86_64"
_GOOD_MAJOR = 8
_CACHED = "qemu-backport"
_PACKAGES = ("qemu-system-x86", "qemu-system-common", "qemu-system-data", "seabios")
# The one that is installed brings the libraries that the backport's program is linked with.
_INSTALLED = ("qemu-system-x86",)
_BACKPORTED = ("bookworm",)


@dataclass(frozen=True, slots=True)
class Qemu:
    """How to start QEMU, and what it can do here."""

    command: tuple[str, ...]
    version: tuple[int, int]
    kvm: bool

    @property
    def processor(self) -> tuple[str, ...]:
        """The flags that choose accelerator and processor."""
        if self.kvm:
            return ("-accel", "kvm", "-cpu", "host")
        # 7.2 lost guests right after cmpxchg16b; without it none of seven boots failed.
        old = ",-cx16" if self.version < (_GOOD_MAJOR, 0) else ""
        return ("-accel", "tcg,thread=multi,tb-size=512", "-cpu", f"qemu64,+pdpe1gb{old}")


def parse_version(text: str) -> tuple[int, int]:
    """The version in what `qemu-system-x86_64 --version` says; (0, 0) when there is none."""
    match = re.search(r"version (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def find_qemu(cache: Path) -> Qemu | None:
    """`$TEST_ASSET_QEMU`, the cache's or the machine's QEMU, whichever comes first."""
    given = os.environ.get("TEST_ASSET_QEMU")
    usr = cache / _CACHED / "usr"
    commands = [
        (given,) if given else (),
        (f"{usr}/bin/{_PROGRAM}", "-L", f"{usr}/share/qemu", "-L", f"{usr}/share/seabios"),
        (shutil.which(_PROGRAM) or "",),
    ]
    for command in commands:
        if command and os.access(command[0], os.X_OK):
            return Qemu(command, _version(command), kvm=_has_kvm())
    return None


def ensure_qemu(cache: Path, say: Say) -> Qemu:
    """Find QEMU, or install it with apt as root. Raises FailedError with the remedy."""
    found = find_qemu(cache)
    if found is None:
        install_packages(_INSTALLED, say)
        found = find_qemu(cache)
    if found is not None and found.version < (_GOOD_MAJOR, 0) and release() in _BACKPORTED:
        say("fetching QEMU from Debian's backports: this machine's own loses guests now and then")
        _backport(cache, say)
        found = find_qemu(cache)
    if found is None:
        raise FailedError(f"there is no {_PROGRAM}", remedy="install QEMU 8 or later")
    return found


def _backport(cache: Path, say: Say) -> None:
    try:
        with install(cache, _CACHED) as folder:
            source = Source(mirror(), f"{release()}-backports")
            for package in download_packages(_PACKAGES, source, folder):
                subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
                package.unlink()
    except (FailedError, subprocess.CalledProcessError) as error:
        say(f"going on with this machine's QEMU: {error}")


def _version(command: tuple[str, ...]) -> tuple[int, int]:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return parse_version(done.stdout)


def _has_kvm() -> bool:
    """Whether there is hardware for it: other kinds of KVM run only kernels made for them."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
        flags = next((line for line in file if line.startswith("flags")), "")
    return bool({"vmx", "svm"} & set(flags.split()))
