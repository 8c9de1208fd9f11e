"""--kv-transfer-config completed: what is missing is added, what contradicts is refused.

Names of vLLM 0.33: vllm/config/kv_transfer.py, vllm/v1/kv_offload/factory.py and tiering/spec.py,
vllm/distributed/kv_transfer/kv_connector/factory.py.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

from hostprep.engines.vllm.command_parser import CONFIG, human_number
from hostprep.engines.vllm.settings import has_slots
from hostprep.errors import BadInputError
from hostprep.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BYTES = "cpu_bytes_to_use"
_BYTES_PER_RANK = "cpu_bytes_to_use_per_rank"
_EXTRA = "kv_connector_extra_config"
_ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
"""It becomes a part of a file's name."""


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
SIMPLE = Connector(
    integration="vllm-simple",
    name="HostprepSimpleConnector",
    replaces=("SimpleCPUOffloadConnector",),
    module="hostprep.engines.vllm",
    is_by_tensor=True,
)

_SPARE_PAGES = 4
_SPARE_SHARE = 16


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
    has_slots(extra, can_have=connector.spec_module is not None)
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


def check_fits(requested: tuple[int, str] | None, size_bytes: int) -> None:
    """Refuse a number of bytes beyond the region's. Raises BadInputError with both numbers."""
    if requested is not None and requested[0] > size_bytes:
        raise _contradicts(
            f"{requested[1]} of {format_bytes(requested[0])}",
            f"the region has {format_bytes(size_bytes)}",
            "ask for less, or leave it out to use the whole region",
        )


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
