"""The node's disk: Debian with systemd, kubelet and containerd, and no Python outside containers.

Built in two steps, both cached: Debian's packages (a minute), then our programs and units on top
(seconds). No boot loader and no initramfs: QEMU starts the kernel out of the package itself.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hostprep.errors import FailedError
from testbed.apt import Source, download_packages, install_packages, mirror
from testbed.cache import Say, install
from testbed.image_build import PRIVATE_MOUNTS

SUITE = "trixie"
"""Its kernel, 6.12, is the first of a stable Debian with tmpfs `noswap` and idmapped hugetlbfs."""
_PACKAGES = (
    *("systemd-sysv", "dbus", "util-linux", "mount", "procps", "kmod", "iproute2", "nftables"),
    *("conntrack", "e2fsprogs", "libseccomp2", "containernetworking-plugins"),
)
_KERNEL = "linux-image-cloud-amd64"
# The root disk is NVMe with ext4, since this kernel has them built in: virtio-blk is a module.
_BUILT_IN = (
    *("BLK_DEV_NVME", "EXT4_FS", "VIRTIO_CONSOLE", "VIRTIO_PCI", "CGROUP_HUGETLB", "NUMA"),
    *("MEMORY_FAILURE", "HUGETLBFS", "TMPFS", "USER_NS"),
)
_FILES = Path(__file__).parent / "node_files"
_SIZE = "3G"
_TOOLS = {"mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs"}


class NodeImage:
    """A kernel, and a root file system that every boot starts from."""

    def __init__(self, folder: Path) -> None:
        self.kernel = folder / "vmlinuz"
        self.root = folder / "rootfs.ext4"


def build_node_image(programs: Mapping[str, Path], *, cache: Path, say: Say) -> NodeImage:
    """Build what is missing, under the builder's lock. Needs root: it makes files of root's.

    Raises FailedError with the remedy.
    """
    name = image_name(programs)
    if not (cache / name).exists():
        if os.geteuid() != 0:
            raise FailedError("the node's disk can only be built as root", remedy="run it as root")
        missing = [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]
        if missing:
            install_packages(missing, say)
        base = _base(cache, say)
        say("building the node's disk: some seconds")
        with install(cache, name) as folder:
            _assemble(base, programs, folder)
        _forget_others(cache, name)
    return NodeImage(cache / name)


def image_name(programs: Mapping[str, Path]) -> str:
    """The folder in the cache: another one for other programs, packages or files."""
    recipe = hashlib.sha256(_base_name().encode())
    for name, path in sorted(programs.items()):
        stat = path.stat()
        recipe.update(f"{name} {path} {stat.st_size} {stat.st_mtime_ns}".encode())
    for path in (*sorted(_FILES.iterdir()), Path(__file__)):
        recipe.update(path.name.encode() + path.read_bytes())
    return f"node-image-{recipe.hexdigest()[:8]}"


def _base_name() -> str:
    text = f"{SUITE} {_PACKAGES} {_KERNEL}"
    return f"node-base-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _base(cache: Path, say: Say) -> Path:
    folder = cache / _base_name()
    if not folder.exists():
        say(f"fetching Debian {SUITE} for the node, once: about a minute")
        source = Source(mirror(), SUITE)
        with install(cache, folder.name) as unfinished:
            _bootstrap(source, unfinished / "root")
            _unpack_kernel(source, unfinished)
    return folder


def _bootstrap(source: Source, root: Path) -> None:
    options = ["--quiet", "--variant=minbase", "--mode=root", f"--include={','.join(_PACKAGES)}"]
    options += ["--aptopt=APT::Install-Recommends false"]
    for what in ("doc", "man", "locale"):
        options.append(f"--dpkgopt=path-exclude=/usr/share/{what}/*")
    _run([*PRIVATE_MOUNTS, "mmdebstrap", *options, source.suite, str(root), str(source)])


def _unpack_kernel(source: Source, folder: Path) -> None:
    """Unpack, not install: there is no boot loader that a package's scripts could find."""
    work = folder / "kernel"
    work.mkdir()
    (work / "pointer").mkdir()
    name = _kernel_package(source, work / "pointer")
    for package in download_packages([name], source, work):
        _run(["dpkg-deb", "-x", str(package), str(work / "unpacked")])
    boot = work / "unpacked" / "boot"
    shutil.copy(next(boot.glob("vmlinuz-*")), folder / "vmlinuz")
    config = next(boot.glob("config-*")).read_text(encoding="ascii")
    lacking = [option for option in _BUILT_IN if f"CONFIG_{option}=y\n" not in config]
    if lacking:
        raise FailedError(f"Debian's {name} lacks {', '.join(lacking)}")
    modules = next((work / "unpacked").glob("**/lib/modules"))
    shutil.copytree(modules, folder / "root/usr/lib/modules", symlinks=True, dirs_exist_ok=True)
    version = next((folder / "root/usr/lib/modules").iterdir()).name
    _run(["chroot", str(folder / "root"), "depmod", version])
    shutil.rmtree(work)


def _kernel_package(source: Source, work: Path) -> str:
    """The package behind the one that only names the newest."""
    (pointer,) = download_packages([_KERNEL], source, work)
    depends = _run(["dpkg-deb", "-f", str(pointer), "Depends"])
    names = (part.split()[0] for part in depends.split(","))
    found = next((name for name in names if name.startswith("linux-image-")), None)
    if found is None:
        raise FailedError(f"Debian {source.suite}'s {_KERNEL} names no kernel: {depends}")
    return found


def _assemble(base: Path, programs: Mapping[str, Path], folder: Path) -> None:
    root = folder / "root"
    _run(["cp", "-a", "--reflink=auto", str(base / "root"), str(root)])
    shutil.copy(base / "vmlinuz", folder / "vmlinuz")
    for name, path in programs.items():
        shutil.copy(path, root / "usr/local/bin" / name)
        (root / "usr/local/bin" / name).chmod(0o755)
    _place_files(root)
    _settle(root)
    command = ["mke2fs", "-q", "-t", "ext4", "-L", "node", "-E", "lazy_itable_init=1"]
    _run([*command, "-d", str(root), str(folder / "rootfs.ext4"), _SIZE])
    shutil.rmtree(root)


def _place_files(root: Path) -> None:
    places = {
        "setup.sh": "usr/local/lib/testbed/setup.sh",
        "containerd.toml": "etc/containerd/config.toml",
        "network.conflist": "etc/cni/net.d/10-testbed.conflist",
    }
    units = root / "etc/systemd/system"
    wanted = units / "multi-user.target.wants"
    wanted.mkdir(parents=True, exist_ok=True)
    for path in _FILES.iterdir():
        if path.suffix == ".service":
            shutil.copy(path, units / path.name)
            (wanted / path.name).symlink_to(f"../{path.name}")
        elif path.name in places:
            target = root / places[path.name]
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    for name in (_FILES / "masked-units.txt").read_text(encoding="ascii").split():
        _link(units / name, "/dev/null")
    _link(units / "default.target", "/lib/systemd/system/multi-user.target")


def _settle(root: Path) -> None:
    """What makes a first boot a quick one, and the image the same for everybody."""
    generators = root / "etc/systemd/system-generators"
    generators.mkdir(parents=True, exist_ok=True)
    for generator in _generators(root):
        _link(generators / generator, "/dev/null")
    texts = {
        "hostname": "node-a\n",
        "hosts": "127.0.0.1 localhost node-a\n",
        "machine-id": "5f0e0c0ffee04a7b9d1e2f3a4b5c6d7e\n",
        "fstab": "",
        "profile.d/testbed.sh": "export CONTAINERD_NAMESPACE=k8s.io PS1='node-a# '\n",
    }
    for name, text in texts.items():
        (root / "etc" / name).unlink(missing_ok=True)
        (root / "etc" / name).write_text(text, encoding="ascii")
    for name in ("etc/resolv.conf", "etc/apt/sources.list"):
        (root / name).unlink(missing_ok=True)
    for name in ("var/lib/apt/lists", "var/cache/apt", "var/log", "etc/apt/sources.list.d"):
        shutil.rmtree(root / name, ignore_errors=True)
        (root / name).mkdir(parents=True)
    # Newer than /usr: systemd then rebuilds neither its catalogues nor ld.so's cache.
    for name in ("etc/.updated", "var/.updated"):
        (root / name).touch()


def _generators(root: Path) -> Iterator[str]:
    for path in (root / "usr/lib/systemd/system-generators").iterdir():
        yield path.name


def _link(path: Path, target: str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def _forget_others(cache: Path, name: str) -> None:
    for folder in cache.glob("node-image-*"):
        if folder.name != name:
            shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        what = " ".join(command[:2])
        raise FailedError(f"{what} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
