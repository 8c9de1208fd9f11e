"""SELinux on the virtual node: a policy of our own with the types that a container comes upon."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from enum import StrEnum
from pathlib import Path

from hostprep.errors import FailedError
from testbed.apt import install_packages
from testbed.cache import Say
from testbed.node import VirtualNode

_RULES = Path(__file__).with_suffix(".cil")
_VERSION = 33
"""Of the policy's format: the newest that Linux 5.14 to 6.12 read."""
_CATEGORIES = 1024
"""As many as container runtimes choose from (github.com/opencontainers/selinux)."""
_KINDS = ("file", "dir", "lnk_file", "chr_file", "blk_file", "sock_file", "fifo_file")
_NAME = "testbed"
_CONTEXTS = """\
process = "system_u:system_r:container_t:s0"
content = "system_u:object_r:container_file_t:s0"
file = "system_u:object_r:container_file_t:s0"
ro_file = "system_u:object_r:container_file_t:s0"
"""
_RUNTIME = "[plugins.'io.containerd.cri.v1.runtime']\nenable_selinux = true\n"


class NewFiles(StrEnum):
    """Which categories a file has that a container makes."""

    AS_ITS_FOLDER = "as its folder"
    """None, below a root without: `default_range ... target low`, as Fedora's policy has it."""
    AS_ITS_MAKER = "as its maker"
    """The container's own: the kernel's way where a policy says nothing."""


def build_policy(new_files: NewFiles, say: Say) -> bytes:
    """Compile the policy. Installs the compiler with apt where it is missing.

    Raises FailedError with the compiler's words.
    """
    if shutil.which("secilc") is None:
        install_packages(["secilc"], say)
    names = [f"c{number}" for number in range(_CATEGORIES)]
    lines = [f"(category {name})" for name in names]
    lines.append(f"(categoryorder ({' '.join(names)}))")
    if new_files is NewFiles.AS_ITS_FOLDER:
        lines += [f"(defaultrange {kind} target low)" for kind in _KINDS]
    with tempfile.TemporaryDirectory() as folder:
        rest, target = Path(folder, "rest.cil"), Path(folder, "policy")
        rest.write_text("\n".join(lines), encoding="ascii")
        command = ["secilc", "-c", str(_VERSION), "-o", str(target), "-f", "/dev/null"]
        done = subprocess.run(
            [*command, str(_RULES), str(rest)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise FailedError(f"secilc failed: {done.stderr.strip()[-2000:]}")
        return target.read_bytes()


def enforce(node: VirtualNode, policy: bytes) -> None:
    """Load a policy into the node's kernel, enforce it, and have containers confined by it.

    The kernel was started with `security=selinux`. Raises CommandError.
    """
    load_policy(node, policy)
    node.guest.write("/etc/selinux/config", f"SELINUX=permissive\nSELINUXTYPE={_NAME}\n")
    node.guest.write(f"/etc/selinux/{_NAME}/contexts/lxc_contexts", _CONTEXTS)
    toml = "/etc/containerd/config.toml"
    node.run(f"cp {toml} {toml}.before; cat >> {toml} <<'END'\n{_RUNTIME}END")
    # As systemd labels it when it boots with a policy.
    node.run("chcon -t var_run_t /run; echo 1 > /sys/fs/selinux/enforce")
    node.run("systemctl restart containerd")
    node.restart_kubelet()


def load_policy(node: VirtualNode, policy: bytes) -> None:
    """Put another policy in place of the one that the kernel has. Raises CommandError."""
    node.guest.write("/run/policy", policy)
    mount = "mountpoint -q /sys/fs/selinux || mount -t selinuxfs none /sys/fs/selinux"
    # The kernel takes it in one piece only.
    node.run(f"{mount}; dd if=/run/policy of=/sys/fs/selinux/load bs=64M status=none")


def stop_enforcing(node: VirtualNode) -> None:
    """Confine nothing any more; the policy itself stays in the kernel until the next boot."""
    toml = "/etc/containerd/config.toml"
    node.run(f"echo 0 > /sys/fs/selinux/enforce; rm -rf /etc/selinux; mv {toml}.before {toml}")
    node.run("systemctl restart containerd")
    node.restart_kubelet()
