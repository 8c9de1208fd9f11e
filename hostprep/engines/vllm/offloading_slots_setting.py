"""Whether vLLM is to use Hostprep's slots: read by the launch as well, before the claim."""

from __future__ import annotations

from hostprep.errors import BadInputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

__all__ = ["SLOTS", "has_slots"]

SLOTS = "hostprep.slots"


def has_slots(config: Mapping[str, Any], *, can_have: bool) -> bool:
    """Return whether slots are wanted; they are evicted in their own way, and are the only tier.

    Raises BadInputError where there is no manager that they can stand in for, or where that one
    is told something that they cannot do.
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
    against = [f"{key} {config[key]!r}" for key, fits in _BESIDE_SLOTS.items() if not fits(config)]
    if against:
        raise BadInputError(
            f"{SLOTS} does not go with {' and '.join(against)}",
            reason="NoSlots",
            remedy=f"leave that out, or leave out {SLOTS}: vLLM's own manager has it",
        )
    return True


def _is_below(limit: int, key: str, config: Mapping[str, Any]) -> bool:
    try:
        return int(config.get(key) or 0) < limit
    except (TypeError, ValueError):
        return False


_BESIDE_SLOTS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "eviction_policy": lambda config: config.get("eviction_policy", "lru") == "lru",
    "cache_policy_module_path": lambda config: not config.get("cache_policy_module_path"),
    "store_threshold": lambda config: _is_below(2, "store_threshold", config),
    "secondary_tiers": lambda config: not config.get("secondary_tiers"),
}
"""What of vLLM's keys says how its own manager evicts and stores: whether it asks for nothing."""
