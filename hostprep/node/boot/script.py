"""The script for before kubelet, and the systemd unit that runs it on later boots.

What the script does is in the shell files beside this module; its settings are filled in here.
"""

from __future__ import annotations

import os
import re
import shlex
from importlib import resources

from hostprep.api.pool_spec import (
    MOUNT_FLAGS,
    MOUNT_SOURCE,
    PoolSpec,
    PoolState,
    mount_options,
    root_options,
)
from hostprep.backing import KIB, MIB, Backing
from hostprep.errors import BadInputError
from hostprep.paths import check_pool_name

_SAFE_PATH = re.compile(r"/[A-Za-z0-9._+/-]*[A-Za-z0-9._+-]", re.ASCII)
_PARTS = ("1-observe.sh", "2-reserve.sh", "3-finish.sh")
_MILLIONTHS_PER_PERCENT = 10_000

_HEAD = """\
#!/bin/sh
# Reserves the huge pages of pool {pool} and mounts them, before kubelet starts.
# Written by `hostprep boot --script`. Needs a POSIX shell, cat, mkdir, mv, rm and mount.
# Run it as root, early in every boot; running it again changes nothing that is right already.
# HOSTPREP_SYSROOT, empty by default, is put before /sys and /proc.

if [ $# -ne 0 ] || [ ! -d "$HOSTPREP_SYSROOT/" ]; then
    echo "usage: [HOSTPREP_SYSROOT=FOLDER] $0    (it takes no arguments)" >&2
    exit 2
fi
"""

_UNIT = """\
[Unit]
Description=Reserve huge pages for Hostprep before kubelet reads the node's capacity
DefaultDependencies=no
RequiresMountsFor={mounts}
After=local-fs.target systemd-tmpfiles-setup.service
Before=kubelet.service k3s.service k3s-agent.service
Conflicts=shutdown.target
Before=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
TimeoutStartSec=120
{starts}

[Install]
WantedBy=multi-user.target
"""


def boot_script(spec: PoolSpec, *, root: str) -> str:
    """Return a POSIX sh script that reserves and mounts what the pool needs, and no more.

    `root` is the handoff's parent folder on the booting node. Raises BadInputError for a pool
    that is to be released, a pool name that is no DNS label, and a root that is not absolute or
    has characters other than letters, digits and `._+-`.
    """
    if spec.state is PoolState.ABSENT:
        raise BadInputError(
            f"pool {spec.name} is to be released: there is nothing to do at boot",
            remedy="remove its boot script from the node instead",
        )
    settings = _settings(spec, _safe_path(root, "root"))
    lines = [f"{name}={shlex.quote(str(value))}" for name, value in settings.items()]
    head = _HEAD.format(pool=settings["POOL"])
    folder = resources.files("hostprep.node.boot")
    parts = [folder.joinpath(name).read_text(encoding="utf-8") for name in _PARTS]
    return "\n".join([head, *lines, "", *parts])


def systemd_unit(*script_paths: str) -> str:
    """Return the text of a unit that runs the scripts one after the other before kubelet.

    Several pools need one unit, not one each: systemd would run those at the same time, and two
    writers of one node's huge pages would lose each other's. Nothing requires the unit, and a
    failed script is ignored: kubelet starts in any case. Raises BadInputError for no script, or
    a path that is not absolute or has characters other than letters, digits and `._+-`.
    """
    if not script_paths:
        raise BadInputError("a unit needs a script", remedy="name the script's path")
    paths = [_safe_path(path, "script") for path in script_paths]
    starts = "\n".join(f"ExecStart=-/bin/sh {path}" for path in paths)
    return _UNIT.format(mounts=" ".join(paths), starts=starts)


def _settings(spec: PoolSpec, root: str) -> dict[str, str | int]:
    return {
        "POOL": check_pool_name(spec.name),
        "ROOT": root,
        "SIZE_KIB": (spec.size_bytes or 0) // KIB,
        "REGION_KIB": (spec.region_bytes or 0) // KIB,
        "PERCENT_MILLIONTHS": int((spec.percent or 0) * _MILLIONTHS_PER_PERCENT),
        "RESERVE_MIB": "" if spec.reserve_bytes is None else -(-spec.reserve_bytes // MIB),
        "BACKINGS": " ".join(backing.value for backing in spec.backings),
        "LAYOUT": spec.layout.value,
        "COUNT": spec.region_count or 1,
        "OPTIONS_2MI": _options(Backing.HUGETLB_2MI, spec),
        "OPTIONS_1GI": _options(Backing.HUGETLB_1GI, spec),
        "ROOT_OPTIONS": ",".join([*MOUNT_FLAGS, "mode=0755", root_options()]),
        "SOURCE": MOUNT_SOURCE,
        "FOLDER_MODE": "0755" if spec.gid is None else "0750",
    }


def _options(backing: Backing, spec: PoolSpec) -> str:
    return ",".join([*MOUNT_FLAGS, mount_options(backing, gid=spec.gid)])


def _safe_path(path: str, what: str) -> str:
    """Return the path if a shell, systemd and mountinfo all read it the same way."""
    if _SAFE_PATH.fullmatch(path) is None or os.path.normpath(path) != path:
        shown = path if len(path) <= 80 else path[:77] + "..."
        raise BadInputError(
            f"{what} {shown!r} is not a plain absolute path",
            remedy="use letters, digits and ._+- only, such as /run/hostprep",
        )
    return path
