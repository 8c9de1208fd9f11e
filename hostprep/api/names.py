"""Every name that the cluster sees: group, kinds, labels, annotations, taint keys, conditions.

Label and taint keys follow the contracts that autoscalers publish; see docs/autoscalers.md.
"""

from __future__ import annotations

GROUP = "hostprep.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
POOL_KIND = "HostMemoryPool"
POOL_PLURAL = "hostmemorypools"
NODE_KIND = "HostMemoryNode"
NODE_PLURAL = "hostmemorynodes"

HOST_MEMORY_READY = "hostprep.dev/HostMemoryReady"
"""Node condition: True when every required pool of the node is verified for this boot."""
MEMORY_ACCOUNTED = "hostprep.dev/MemoryAccounted"
"""Node condition: whether the scheduler knows that the pools' memory is taken."""
HUGE_PAGES_ACCOUNTED = "hostprep.dev/HugePagesAccounted"
"""Node condition: whether kubelet offers the pools' huge pages to other pods (then False)."""
HOST_MEMORY_RELEASING = "hostprep.dev/HostMemoryReleasing"
"""Node condition: True while memory that no pool asks for any more is kept, or given back."""

READY_LABEL_PREFIX = "ready.hostprep.dev/"
"""Dynamic label, set by the operator: for people. In an engine's nodeSelector it would break
scale from zero, since no autoscaler's template has it."""
MARKS_ANNOTATION = "hostprep.dev/marks"
"""Node annotation: what the operator put on the node and what the last opening rested on."""

CLUSTER_AUTOSCALER_TAINT = "startup-taint.cluster-autoscaler.kubernetes.io/hostprep"
"""Cluster Autoscaler counts nodes with a taint of this prefix as still starting."""
KARPENTER_LABEL = "karpenter.sh/nodepool"
"""Label of every node that Karpenter made."""
READINESS_CONTROLLER_TAINT = "readiness.k8s.io/hostprep"
"""node-readiness-controller's; set and removed by it, never by us."""

DEVICE_RESOURCE_PREFIX = f"{GROUP}/"
"""With a pool's name: the resource of its regions, where kubelet hands them out."""

COMPONENT_LABEL = "app.kubernetes.io/component"
AGENT_COMPONENT = "agent"


def ready_label(pool: str) -> str:
    """Return the key of the label that says that the pool is ready on a node."""
    return READY_LABEL_PREFIX + pool
