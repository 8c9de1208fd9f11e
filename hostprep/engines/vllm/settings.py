"""Our keys in vLLM's kv_connector_extra_config, read and checked."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hostprep.client import environment
from hostprep.client.owner import check_owner_name
from hostprep.cuda.pace import DUTY_CYCLE, Spacing
from hostprep.engines.memory import MEMORY_KEYS
from hostprep.errors import BadInputError
from hostprep.units import parse_quantity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

SLOTS = "hostprep.slots"
_REGISTER = ("auto", "always", "never")
_MODES = ("background", "sync")
_DEADLINE_S = 1800.0

WARM = "hostprep.warm"
FALLBACK = "hostprep.fallback"
_FALLBACKS = ("gpu-only", "unpinned")
_DUTY_CYCLE = "hostprep.duty_cycle"
_GROWS = "hostprep.grows"
_OWN_KEYS = (
    "hostprep.register",
    "hostprep.mode",
    "hostprep.deadline_s",
    FALLBACK,
    _DUTY_CYCLE,
    _GROWS,
    SLOTS,
    WARM,
)
_KEYS = (*MEMORY_KEYS, *_OWN_KEYS, "hostprep.owner_file")
"""All keys of ours; what else begins with "hostprep." is a slip of the pen."""


@dataclass(frozen=True)
class Settings:
    """The keys of a plugin inside vLLM."""

    register: str
    """auto: where the platform is CUDA; always; never."""
    mode: str
    """background: the engine serves meanwhile; sync: before it serves, as vLLM does by itself."""
    deadline_s: float
    """For how long registering may make no progress: after that the engine serves without the host
    tier until a restart."""
    duty_cycle: float
    """The share of the time that registering may take while the engine works."""
    size_bytes: int | None
    """vLLM's own cpu_bytes_to_use; None: the whole region."""
    grows: bool = True
    """The host tier is used from the first registered chunks on; else once all are."""
    is_unpinned_allowed: bool = False
    """What could not be registered is used as it is, in slower copies; else the engine serves
    without the host tier."""
    slots: bool = False
    """Hostprep's slots in place of vLLM's own manager: unless that is asked for."""
    warm: str | None = None
    """Under which name blocks are kept for the next process; None: they are not."""

    @classmethod
    def read(cls, config: Mapping[str, Any], *, can_have_slots: bool = False) -> Settings:
        """Read kv_connector_extra_config.

        Raises BadInputError for what is unknown or no number, and for what cannot go together.
        `can_have_slots`: whether the connector is our OffloadingConnector, which has a manager that
        slots can replace, and copies that need no registered memory.
        """
        check_settings(config)
        warm = warm_name(config, can_keep=can_have_slots)
        return cls(
            warm=warm,
            register=_one_of(config, "hostprep.register", _REGISTER),
            mode=_one_of(config, "hostprep.mode", _MODES),
            deadline_s=_deadline_s(config),
            duty_cycle=_duty_cycle(config),
            grows=_grows(config),
            is_unpinned_allowed=allows_unpinned(config, can_be=can_have_slots),
            size_bytes=_size_bytes(config.get("cpu_bytes_to_use")),
            slots=has_slots(
                {
                    SLOTS: warm is not None or (can_have_slots and not _asks_for_vllms(config)),
                    **config,
                },
                can_have=can_have_slots,
            ),
        )

    def registers(self, *, is_cuda: bool) -> bool:
        """Tell whether this engine registers its memory."""
        return is_cuda if self.register == "auto" else self.register == "always"


def check_settings(config: Mapping[str, Any]) -> None:
    """Raise BadInputError for keys of ours that are unknown, or have no value that they can have.

    It needs no engine: `hostprep exec` says so before the memory is claimed.
    """
    unknown = [key for key in config if key.startswith("hostprep.") and key not in _KEYS]
    if unknown:
        raise BadInputError(
            f"kv_connector_extra_config holds the unknown key(s) {', '.join(sorted(unknown))}",
            reason="UnknownKey",
            remedy=f"known are {', '.join(_KEYS)}",
        )
    _one_of(config, "hostprep.register", _REGISTER)
    _one_of(config, "hostprep.mode", _MODES)
    _one_of(config, FALLBACK, _FALLBACKS)
    _deadline_s(config)
    _duty_cycle(config)
    _grows(config)


def allows_unpinned(config: Mapping[str, Any], *, can_be: bool) -> bool:
    """Return whether memory that cannot be registered is to be used as it is (hostprep.fallback).

    Raises BadInputError where the engine's copies rest on registered memory: they let the GPU read
    it by itself, or count on a copy being under way when the call returns.
    """
    is_wanted = _one_of(config, FALLBACK, _FALLBACKS) == "unpinned"
    if is_wanted and not can_be:
        raise BadInputError(
            f"{FALLBACK} 'unpinned' is of HostprepOffloadingSpec alone: other copies need "
            "registered memory",
            reason="NoUnpinned",
            remedy="leave it out, or use `hostprep exec --engine vllm-offloading`",
        )
    return is_wanted


def warm_name(config: Mapping[str, Any], *, can_keep: bool) -> str | None:
    """Return under which name the engine's blocks are kept; None where they are not.

    `hostprep exec --warm NAME` says so, or the configuration of an engine that claims by itself.
    Raises BadInputError for what is neither true, false nor a name, and where nothing can be kept.
    """
    given, name = config.get(WARM), os.environ.get(environment.WARM)
    if name is None and given in (None, False):
        return None
    if not can_keep or config.get(SLOTS) is False:
        raise BadInputError(
            "blocks are kept by Hostprep's slots alone, in HostprepOffloadingSpec",
            reason="CannotKeep",
            remedy=f"leave {WARM} (--warm) out, or use --engine vllm-offloading with {SLOTS}",
        )
    if name is not None and given in (None, True, name):
        return name
    if name is None and isinstance(given, str) and config.get("hostprep.owner_file"):
        return check_owner_name(given, WARM)
    raise BadInputError(
        f"{WARM} is {given!r}, "
        + (
            f"and the memory is kept as {name!r}"
            if name is not None
            else "and nothing shows that the next engine is the same one"
        ),
        reason="BadOwner",
        remedy="start it by `hostprep exec --warm NAME --owner-file FILE`, or give a name here and "
        "hostprep.owner_file",
    )


def has_slots(config: Mapping[str, Any], *, can_have: bool) -> bool:
    """Return whether the configuration asks for Hostprep's slots (hostprep.slots).

    They have an eviction order of their own, and are the only tier. Raises BadInputError where
    there is no manager that they can replace, and for keys of that manager which they ignore.
    """
    wanted = config.get(SLOTS, False)
    if not isinstance(wanted, bool):
        raise BadInputError(
            f"{SLOTS} is {wanted!r}", reason="BadSetting", remedy="give true or false"
        )
    if not wanted:
        return False
    if not can_have:
        raise BadInputError(
            f"{SLOTS} is of HostprepOffloadingSpec alone",
            reason="NoSlots",
            remedy="leave it out, or use `hostprep exec --engine vllm-offloading`",
        )
    against = [
        f"{key} {config[key]!r}"
        for key, is_harmless in _HARMLESS.items()
        if key in config and not is_harmless(config[key])
    ]
    if against:
        raise BadInputError(
            f"{SLOTS} does not go with {' and '.join(against)}",
            reason="NoSlots",
            remedy=f"leave that out, or leave out {SLOTS}: vLLM's own manager has it",
        )
    return True


def _asks_for_vllms(config: Mapping[str, Any]) -> bool:
    """Tell whether a setting of vLLM's own manager is given that says how it is to keep chunks."""
    return any(config.get(key) for key in _OF_VLLMS_OWN)


def _is_number(given: Any) -> bool:
    try:
        return int(given or 0) >= 0
    except (TypeError, ValueError):
        return False


_OF_VLLMS_OWN = ("eviction_policy", "cache_policy_module_path", "secondary_tiers")
_HARMLESS: dict[str, Callable[[Any], bool]] = {
    "eviction_policy": lambda given: given in ("lru", "arc"),  # slots' own is as good as either
    "cache_policy_module_path": lambda given: not given,
    "store_threshold": _is_number,
    "max_tracker_size": _is_number,
    "secondary_tiers": lambda given: not given,
}
"""vLLM's keys for how its own manager evicts and stores, and whether slots have it too."""


def _one_of(config: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    chosen = str(config.get(key, choices[0]))
    if chosen not in choices:
        raise BadInputError(
            f"{key} is {chosen!r}", reason="BadSetting", remedy=f"give {' or '.join(choices)}"
        )
    return chosen


def _deadline_s(config: Mapping[str, Any]) -> float:
    given = config.get("hostprep.deadline_s", _DEADLINE_S)
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise BadInputError(
            f"hostprep.deadline_s is {given!r}",
            reason="BadSetting",
            remedy="give seconds, more than 0",
        )
    return seconds


def _duty_cycle(config: Mapping[str, Any]) -> float:
    given = config.get(_DUTY_CYCLE, DUTY_CYCLE)
    try:
        return Spacing(float(given)).duty_cycle
    except (TypeError, ValueError):
        raise BadInputError(
            f"{_DUTY_CYCLE} is {given!r}",
            reason="BadSetting",
            remedy=f"give a share of the time, such as {DUTY_CYCLE:g}",
        ) from None


def _grows(config: Mapping[str, Any]) -> bool:
    given = config.get(_GROWS, True)
    if not isinstance(given, bool):
        raise BadInputError(
            f"{_GROWS} is {given!r}", reason="BadSetting", remedy="give true or false"
        )
    return given


def _size_bytes(given: Any) -> int | None:
    """Return a number of bytes, or None where there is none (vLLM takes 0 for none as well)."""
    if not given:
        return None
    if isinstance(given, (int, float)) and given > 0:
        return int(given)
    return parse_quantity(str(given))
