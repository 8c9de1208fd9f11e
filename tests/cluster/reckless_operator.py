"""The operator without three of its safety steps: what watches over it must find that.

It believes every status to be of the boot that the node runs; and for nodes with the label BLIND it
sees no pool, takes what it does not see for deleted, and waits for no turn to release it.
`python -m tests.cluster.reckless_operator`, else as the real one.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from hostprep_operator import controller
from hostprep_operator.cli import main
from hostprep_operator.reconcile.changes import NodeChanges, NodeView
from hostprep_operator.reconcile.node import reconcile_node

BLIND = "example.com/blind"


def _recklessly(view: NodeView) -> NodeChanges:
    if view.node is not None and view.hmn is not None and view.hmn.status.boot_id:
        status = replace(view.hmn.status, boot_id=view.node.boot_id)
        view = replace(view, hmn=replace(view.hmn, status=status))
    if view.node is not None and view.hmn is not None and BLIND in view.node.labels:
        names = frozenset(entry.name for entry in view.hmn.entries)
        view = replace(view, pools=(), gone_pools=names, granted=names)
    return reconcile_node(view)


if __name__ == "__main__":
    controller.reconcile_node = _recklessly  # type: ignore[attr-defined]
    sys.exit(main())
