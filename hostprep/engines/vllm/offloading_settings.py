"""What a user may say of us in vLLM's kv_connector_extra_config."""

from __future__ import annotations

from dataclasses import dataclass

from hostprep.engines.memory import MEMORY_KEYS
from hostprep.engines.vllm.offloading_slots_setting import SLOTS, has_slots
from hostprep.errors import BadInputError
from hostprep.units import parse_quantity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["SETTING_KEYS", "Settings"]

_REGISTER = ("auto", "always", "never")
_MODES = ("background", "sync")
_DEADLINE_S = 1800.0

SETTING_KEYS = (
    *MEMORY_KEYS,
    "hostprep.register",
    "hostprep.mode",
    "hostprep.deadline_s",
    SLOTS,
)
"""All keys of ours; what else begins with "hostprep." is a slip of the pen."""


@dataclass(frozen=True)
class Settings:
    """Our keys, read and checked."""

    register: str
    """auto: where the platform is CUDA; always; never."""
    mode: str
    """background: the engine serves meanwhile; sync: before it serves, as vLLM does by itself."""
    deadline_s: float
    """From the start of the engine: then the host tier is given up until it is restarted."""
    size_bytes: int | None
    """vLLM's own cpu_bytes_to_use; None: the whole region."""
    slots: bool = False
    """Hostprep's slots in place of vLLM's own manager."""

    @classmethod
    def read(cls, config: Mapping[str, Any], *, can_have_slots: bool = False) -> Settings:
        """Read kv_connector_extra_config.

        Raises BadInputError for what is unknown or no number, and for what cannot go together.
        `can_have_slots`: whether the connector has a manager that slots can stand in for.
        """
        unknown = [key for key in config if _is_ours(key) and key not in SETTING_KEYS]
        if unknown:
            raise BadInputError(
                f"kv_connector_extra_config holds the unknown key(s) {', '.join(sorted(unknown))}",
                reason="UnknownKey",
                remedy=f"known are {', '.join(SETTING_KEYS)}",
            )
        return cls(
            register=_one_of(config, "hostprep.register", _REGISTER),
            mode=_one_of(config, "hostprep.mode", _MODES),
            deadline_s=_seconds(config, "hostprep.deadline_s", _DEADLINE_S),
            size_bytes=_size(config, "cpu_bytes_to_use"),
            slots=has_slots(config, can_have=can_have_slots),
        )

    def does_register(self, *, is_cuda: bool) -> bool:
        """Tell whether this engine registers its memory."""
        return is_cuda if self.register == "auto" else self.register == "always"


def _is_ours(key: object) -> bool:
    return isinstance(key, str) and key.startswith("hostprep.")


def _one_of(config: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> str:
    chosen = str(config.get(key, choices[0]))
    if chosen not in choices:
        raise BadInputError(
            f"{key} is {chosen!r}", reason="BadSetting", remedy=f"give {' or '.join(choices)}"
        )
    return chosen


def _seconds(config: Mapping[str, Any], key: str, otherwise: float) -> float:
    try:
        seconds = float(config.get(key, otherwise))
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise BadInputError(
            f"{key} is {config[key]!r}", reason="BadSetting", remedy="give seconds, more than 0"
        )
    return seconds


def _size(config: Mapping[str, Any], key: str) -> int | None:
    """Return a number of bytes, or None where there is none (vLLM takes 0 for none as well)."""
    given = config.get(key)
    if not given:
        return None
    if isinstance(given, (int, float)) and given > 0:
        return int(given)
    return parse_quantity(str(given))
