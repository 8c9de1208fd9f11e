"""Launching vLLM over leased regions: its command line completed for each of its integrations.

--kv-transfer-config gets what is missing, and what contradicts is refused. Names of vLLM 0.33:
vllm/config/kv_transfer.py, vllm/v1/kv_offload/factory.py and tiering/spec.py,
vllm/distributed/kv_transfer/kv_connector/factory.py.
"""

from __future__ import annotations

import copy
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    CONFIG,
    CommandLine,
    Ranks,
    human_number,
    local_ranks,
    parse_config,
    read_command,
    worker_count,
)
from hostprep.engines.vllm.settings import SLOTS, WARM, allows_unpinned, check_settings, has_slots
from hostprep.errors import BadInputError
from hostprep.layout import directory_bytes
from hostprep.units import format_bytes, format_exact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hostprep.client.lease import Lease

_FILE = "/dev/shm/vllm_offload_{}.mmap"  # noqa: S108 - vLLM's own, shared_offload_region.py
_PROTECTED = "/proc/sys/fs/protected_symlinks"
_CONFIGURATION = r"kv[-_](?:transfer|offloading)[-_]\w+|data[-_]parallel[-_][\w-]+"
_GPUS = r"device[-_]i\w*"
SIZE_KEYS = r"(?:tensor|pipeline|prefill[-_]context)[-_]parallel[-_]s\w*"
"""Keys of a --config file, as regular expressions: how many workers there are."""
_OFFLOADING = ("--kv-offloading-size", "--kv-offloading-backend")
_RANKS_BY_NUMBER = (0, 32)
"""Since this release the Tiering spec gives a worker the place of its rank in the region. Before,
that of its GPU's number, modulo the number of workers (vllm/v1/kv_offload/tiering/spec.py)."""
_OTHER_USER = ("gosu", "runuser", "setpriv", "su", "su-exec", "sudo")
_BYTES = "cpu_bytes_to_use"
_BYTES_PER_RANK = "cpu_bytes_to_use_per_rank"
_EXTRA = "kv_connector_extra_config"
_ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
"""It becomes a part of a file's name."""
_SPARE_PAGES = 4
_SPARE_SHARE = 16


@dataclass(frozen=True)
class Connector:
    """What one integration needs in the configuration."""

    integration: str
    name: str
    replaces: tuple[str, ...] = ()
    """Connectors in whose place it comes."""
    module: str | None = None
    spec: str | None = None
    spec_module: str | None = None
    replaces_spec: tuple[str, ...] = ()
    is_tiering: bool = False
    """Whether vLLM opens a file of its own name, and takes a list of further tiers."""
    is_by_tensor: bool = False
    """Whether tensors of several sizes are laid out one after another, each on pages of its own."""


TIERING = Connector(
    integration="vllm",
    name="OffloadingConnector",
    spec="TieringOffloadingSpec",
    is_tiering=True,
)
OFFLOADING = Connector(
    integration="vllm-offloading",
    name="OffloadingConnector",
    spec="HostprepOffloadingSpec",
    spec_module="hostprep.engines.vllm",
    replaces_spec=("CPUOffloadingSpec",),
)
KEEPING = replace(
    OFFLOADING,
    name="HostprepOffloadingConnector",
    replaces=("OffloadingConnector",),
    module="hostprep.engines.vllm",
)
"""In place of OFFLOADING where blocks are kept: it sees what they depend on."""
SIMPLE = Connector(
    integration="vllm-simple",
    name="HostprepSimpleConnector",
    replaces=("SimpleCPUOffloadConnector",),
    module="hostprep.engines.vllm",
    is_by_tensor=True,
)
_CONNECTORS = {each.integration: each for each in (TIERING, OFFLOADING, SIMPLE)}


def requirements(start: EngineStart) -> Requirements:
    """Return what a vLLM command needs. Raises BadInputError; reads, and changes nothing."""
    return connector_requirements(_connector(start), start.command, start.environ)


def _connector(start: EngineStart) -> Connector:
    connector = _CONNECTORS[start.integration.name]
    return KEEPING if connector is OFFLOADING and start.options.warm else connector


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
    if connector is KEEPING and size_bytes <= (least := directory_bytes(1)):
        # How large a chunk is only vLLM knows, with its model: here, that there is any room.
        size_bytes = least + 1
        because = f"--warm: the directory of what is kept takes {format_exact(least)} or more"
    return Requirements(len(ranks.numbers), size_bytes, because, paths)


def complete(start: EngineStart, leases: Sequence[Lease]) -> Launch:
    """Return the command completed for these leases, one for each data-parallel rank."""
    connector, environ = _connector(start), start.environ
    line = read_command(start.command)
    config = parse_config(line)
    first = leases[0]
    size_bytes = min(lease.region.size_bytes for lease in leases)
    page_bytes = max(lease.region.page_bytes for lease in leases)
    workers = worker_count(line)
    requested = requested_bytes(config, workers)
    if requested is not None and requested[0] > size_bytes:
        raise _contradicts(
            f"{requested[1]} of {format_bytes(requested[0])}",
            f"the region has {format_bytes(size_bytes)}",
            "ask for less, or leave it out to use the whole region",
        )
    usable = usable_bytes(connector, size_bytes, page_bytes=page_bytes, workers=workers)
    config = complete_config(config, connector, engine_id=first.lease_id, size_bytes=usable)
    links: tuple[tuple[str, int], ...] = ()
    variables: dict[str, str] = {}
    if connector.is_tiering:
        paths = _link_paths(local_ranks(line), str(config["engine_id"]))
        links = tuple((path, index) for index, path in enumerate(paths))
    else:
        variables = python_path(first.paths.root, line.program, environ)
    used_bytes = (usable if requested is None else requested[0]) * len(leases)
    notes = notes_of(line, connector, environ)
    return Launch(line.with_config(config), variables, links, notes, used_bytes)


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


def check_config(config: dict[str, Any], connector: Connector) -> None:
    """Raise BadInputError for a configuration that contradicts the integration."""
    given = config.get("kv_connector")
    if given not in (None, connector.name, *connector.replaces):
        raise _contradicts(
            f"kv_connector {given!r}",
            f"--engine {connector.integration} needs {connector.name}",
            "leave kv_connector out, or leave --engine out and lead your connector to the memory "
            "by --link or the variables",
        )
    extra = _extra(config)
    _check_module(config, "kv_connector_module_path", connector.module)
    _check_spec(extra, connector)
    if connector.module and extra.get("kv_offload_backend", "cpu") != "cpu":
        raise _contradicts(
            f"kv_offload_backend {extra['kv_offload_backend']!r}",
            "it keeps its blocks in a file on disk",
            "leave it out",
        )
    has_plugin = bool(connector.module or connector.spec_module)
    if has_plugin:
        check_settings(extra)
    is_offloading = connector.spec_module is not None
    has_slots(extra, can_have=is_offloading)
    allows_unpinned(extra, can_be=is_offloading)
    if has_plugin and extra.get(WARM) not in (None, False, connector is KEEPING):
        raise _contradicts(
            f"{WARM} {extra[WARM]!r}",
            "`hostprep exec` claims the memory, and --warm says under which name it is kept",
            f"leave {WARM} out, and give `hostprep exec` --warm NAME --owner-file FILE",
        )
    for key in (SLOTS, WARM) if connector is KEEPING else ():
        if extra.get(key) is False:
            raise _contradicts(
                f"{key} false",
                "--warm keeps what Hostprep's slots hold",
                f"leave {key} out, or --warm",
            )
    tiers = extra.get("secondary_tiers", [])
    if connector.is_tiering and not isinstance(tiers, list):
        raise _contradicts("secondary_tiers", "it is no list", "give a list, or leave it out")
    engine_id = config.get("engine_id")
    if engine_id is not None and not _ENGINE_ID.fullmatch(str(engine_id)):
        raise _contradicts(
            f"engine_id {engine_id!r}",
            "it becomes a file's name",
            "use letters, digits, dots, hyphens and underscores, or leave it out",
        )


def requested_bytes(config: dict[str, Any], workers: int) -> tuple[int, str] | None:
    """Return how many bytes one engine is to use, and by which key; None where no key says so.

    `workers` is the number of its processes with a GPU each, for keys that count by them.
    """
    extra = _extra(config)
    for key, times in ((_BYTES_PER_RANK, workers), (_BYTES, 1)):
        if key in extra:
            return _bytes(extra[key], key) * times, key
    return None


def usable_bytes(connector: Connector, size_bytes: int, *, page_bytes: int, workers: int) -> int:
    """Return how much of a region an engine is to use where its configuration does not say.

    Where tensors begin on pages of their own, some pages of each worker's part are left over for
    that: as many as models with a few kinds of layers need, and a small part at most.
    """
    if not connector.is_by_tensor:
        return size_bytes
    part = size_bytes // workers // page_bytes * page_bytes or size_bytes // workers
    return (part - min(_SPARE_PAGES * page_bytes, part // _SPARE_SHARE)) * workers


def complete_config(
    config: dict[str, Any], connector: Connector, *, engine_id: str, size_bytes: int
) -> dict[str, Any]:
    """Return the configuration with everything that the integration needs; what is there stays.

    Raises BadInputError as `check_config` does. Completing it again changes nothing.
    """
    check_config(config, connector)
    config = copy.deepcopy(config)
    config["kv_connector"] = connector.name
    if connector.module:
        config["kv_connector_module_path"] = connector.module
    config.setdefault("kv_role", "kv_both")
    config["engine_id"] = config.get("engine_id") or engine_id
    extra = config[_EXTRA] = _extra(config)
    if connector.spec:
        extra["spec_name"] = connector.spec
    if connector.spec_module:
        extra["spec_module_path"] = connector.spec_module
    if requested_bytes(config, 1) is None:
        extra[_BYTES] = size_bytes
    if connector.is_tiering:
        extra.setdefault("secondary_tiers", [])
    return config


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
        if line.all(option):
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
    chooses_gpus = line.all("--device-ids") or key_in_file(path, _GPUS)
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


def _check_spec(extra: dict[str, Any], connector: Connector) -> None:
    spec = extra.get("spec_name")
    if connector.spec is None or spec in (None, connector.spec, *connector.replaces_spec):
        if connector.spec_module:
            _check_module(extra, "spec_module_path", connector.spec_module)
        return
    if spec == "CPUOffloadingSpec":
        raise _contradicts(
            "spec_name 'CPUOffloadingSpec'",
            "it splits its memory into as many as 32 files and maps them at offsets that huge "
            "pages cannot have, so one prepared region cannot serve it",
            "leave spec_name out (--engine vllm then uses TieringOffloadingSpec, one file), or "
            "use --engine vllm-offloading",
        )
    raise _contradicts(
        f"spec_name {spec!r}",
        f"--engine {connector.integration} needs {connector.spec}",
        "leave spec_name out, or leave --engine out and read HOSTPREP_PATH in your spec",
    )


def _check_module(config: dict[str, Any], key: str, module: str | None) -> None:
    given = config.get(key)
    if given is not None and given != module:
        raise _contradicts(
            f"{key} {given!r}",
            f"this integration needs {module!r}" if module else "this integration loads no module",
            f"leave {key} out",
        )


def _extra(config: dict[str, Any]) -> dict[str, Any]:
    extra = config.get(_EXTRA)
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise _contradicts(_EXTRA, "it is no JSON object", "give an object, or leave it out")
    return extra


def _bytes(given: object, key: str) -> int:
    try:
        size_bytes = human_number(given) if isinstance(given, str) else int(given)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        size_bytes = 0
    if isinstance(given, bool) or size_bytes < 1:
        raise _contradicts(
            f"{key} {given!r}", "it is no number of bytes", "leave it out to use the whole region"
        )
    return int(size_bytes)


def _contradicts(what: str, why: str, remedy: str) -> BadInputError:
    return BadInputError(f"{CONFIG} has {what}: {why}", reason="BadCommand", remedy=remedy)
