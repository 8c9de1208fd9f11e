"""Facts of this node, read from procfs and sysfs: changes nothing, whatever it reads."""

from __future__ import annotations

from hostprep.node.observe.host import HostRoot
from hostprep.node.observe.node import observe

__all__ = ["HostRoot", "observe"]
