"""Facts of this node, read from procfs and sysfs: changes nothing, whatever it reads."""

from __future__ import annotations

from hostprep.observe.host import HostRoot
from hostprep.observe.node import observe

__all__ = ["HostRoot", "observe"]
