"""Launching vLLM over leased regions: its command line completed for each of its integrations."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence

from hostprep.engines.catalogue import integration_of
from hostprep.engines.installation import installed_version, python_path, release_notes
from hostprep.engines.launching import (
    EngineStart,
    Launch,
    Requirements,
    key_in_file,
    refuse_in_file,
)
from hostprep.engines.vllm.command_parser import (
    CommandLine,
    Ranks,
    local_ranks,
    parse_config,
    read_command,
    worker_count,
)
from hostprep.engines.vllm.configuration import (
    OFFLOADING,
    SIMPLE,
    TIERING,
    Connector,
    check_config,
    check_fits,
    complete_config,
    requested_bytes,
    usable_bytes,
)
from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostprep.client.lease import Lease

_FILE = "/dev/shm/vllm_offload_{}.mmap"  # noqa: S108 - vLLM's own, shared_offload_region.py
_PROTECTED = "/proc/sys/fs/protected_symlinks"
_CONFIGURATION = r"kv[-_](?:transfer|offloading)[-_]\w+|data[-_]parallel[-_][\w-]+"
_GPUS = r"device[-_]i\w*"
SIZE_KEYS = r"(?:tensor|pipeline|prefill[-_]context)[-_]parallel[-_]s\w*"
"""Keys of a --config file, as regular expressions: how many workers there are."""
_OFFLOADING = ("--kv-offloading-size", "--kv-offloading-backend")
_CONNECTORS = {each.integration: each for each in (TIERING, OFFLOADING, SIMPLE)}
_RANKS_BY_NUMBER = (0, 32)
"""Since this release the Tiering spec gives a worker the place of its rank in the region. Before,
that of its GPU's number, modulo the number of workers (vllm/v1/kv_offload/tiering/spec.py)."""
_OTHER_USER = ("gosu", "runuser", "setpriv", "su", "su-exec", "sudo")


def requirements(start: EngineStart) -> Requirements:
    """Return what a vLLM command needs. Raises BadInputError; reads, and changes nothing."""
    connector = _CONNECTORS[start.integration.name]
    return connector_requirements(connector, start.command, start.environ)


def connector_requirements(
    connector: Connector, command: Sequence[str], environ: Mapping[str, str]
) -> Requirements:
    """Return what a vLLM command with that connector needs. Raises BadInputError.

    `environ`: by which the installed release is found, for what only some releases cannot do.
    """
    line = read_command(command)
    _check_options(line, connector)
    _check_release(line, connector, environ)
    config = parse_config(line)
    check_config(config, connector)
    ranks = local_ranks(line)
    requested = requested_bytes(config, worker_count(line))
    paths: tuple[str, ...] = ()
    if connector.is_tiering and config.get("engine_id"):
        paths = _link_paths(ranks, str(config["engine_id"]))
    size_bytes, because = requested or (1, "")
    return Requirements(len(ranks.numbers), size_bytes, because, paths)


def complete(start: EngineStart, leases: Sequence[Lease]) -> Launch:
    """Return the command completed for these leases, one for each data-parallel rank."""
    connector, environ = _CONNECTORS[start.integration.name], start.environ
    line = read_command(start.command)
    config = parse_config(line)
    first = leases[0]
    size_bytes = min(lease.region.size_bytes for lease in leases)
    page_bytes = max(lease.region.page_bytes for lease in leases)
    workers = worker_count(line)
    check_fits(requested_bytes(config, workers), size_bytes)
    usable = usable_bytes(connector, size_bytes, page_bytes=page_bytes, workers=workers)
    config = complete_config(config, connector, engine_id=first.lease_id, size_bytes=usable)
    links: tuple[tuple[str, int], ...] = ()
    variables: dict[str, str] = {}
    if connector.is_tiering:
        paths = _link_paths(local_ranks(line), str(config["engine_id"]))
        links = tuple((path, index) for index, path in enumerate(paths))
    else:
        variables = python_path(first.paths.root, line.program, environ)
    return Launch(line.with_config(config), variables, links, notes_of(line, connector, environ))


def notes_of(
    line: CommandLine, connector: Connector, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Return notes for people about how vLLM is started."""
    notes = list(release_notes(integration_of(SIMPLE.integration), line.program, environ))
    changes_user = os.path.basename(line.words[0]) in _OTHER_USER
    if connector.is_tiering and changes_user and not _others_may_follow(os.path.dirname(_FILE)):
        notes.append(
            f"{line.words[0]} changes the user after the link in /dev/shm was made, and another "
            "user may not follow it there (fs.protected_symlinks): have "
            f"{line.words[0]} start `hostprep exec` instead"
        )
    if line.last("--distributed-executor-backend") == "ray":
        notes.append("workers that Ray starts hold no lease of their own")
    return tuple(notes)


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
        return True  # linking will find out
    guarded = stat.S_ISVTX | stat.S_IWOTH
    return not is_on or status.st_uid == os.geteuid() or status.st_mode & guarded != guarded


def _check_options(line: CommandLine, connector: Connector) -> None:
    """Refuse options that set the same thing elsewhere, on the command line or in its file."""
    for option in _OFFLOADING:
        if line.has(option):
            raise BadInputError(
                f"{option} is given, which chooses another connector and size than "
                f"--engine {connector.integration} does",
                reason="BadCommand",
                remedy="leave it out: the region says how much there is",
            )
    refuse_in_file(line.last("--config"), _CONFIGURATION, engine=connector.integration)


def _check_release(line: CommandLine, connector: Connector, environ: Mapping[str, str]) -> None:
    """Refuse what the release that is installed would do wrong."""
    path = line.last("--config")
    chooses_gpus = line.has("--device-ids") or key_in_file(path, _GPUS)
    has_several = worker_count(line) > 1 or key_in_file(path, SIZE_KEYS)
    if not (connector.is_tiering and chooses_gpus and has_several):
        return
    packages = integration_of(connector.integration).packages
    version = installed_version(line.program, packages, environ)
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < _RANKS_BY_NUMBER:
        raise BadInputError(
            f"vLLM {version} places its ranks in the region by the numbers of their GPUs: with "
            "--device-ids two may write to one place",
            reason="OldRelease",
            remedy="choose the GPUs by CUDA_VISIBLE_DEVICES, or use vLLM 0.32 or later, or "
            "--engine vllm-offloading",
        )


def _link_paths(ranks: Ranks, engine_id: str) -> tuple[str, ...]:
    return tuple(_FILE.format(name) for name in ranks.engine_ids(engine_id))
