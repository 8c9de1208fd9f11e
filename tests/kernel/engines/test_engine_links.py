"""Links where engines look: whether one may be replaced is asked without disturbing claimers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from hostprep.client.claim import claim, claim_lock
from hostprep.client.lease import Request
from hostprep.engines.links import check_template, link_regions
from hostprep.errors import BadInputError
from hostprep.node.apply.service import Node
from hostprep.paths import PoolPaths
from testbed.machine import POOL, pool_of

pytestmark = pytest.mark.kernel


def test_a_link_is_looked_at_while_nobody_claims(node: Node, tmp_path: Path) -> None:
    """Trying a region's lock takes it for an instant: a claimer would call it leased."""
    node.prepare([pool_of()])
    paths, link = PoolPaths(node.root, POOL), str(tmp_path / "kv.bin")
    (lease,) = claim(paths, Request())
    link_regions([lease], link)
    with pytest.raises(BadInputError, match="is leased"):
        check_template(paths, link, 1)
    lease.close()

    asking = threading.Thread(target=check_template, args=(paths, link, 1), daemon=True)
    with claim_lock(paths):
        asking.start()
        asking.join(0.5)
        assert asking.is_alive()
    asking.join(30)
    assert not asking.is_alive()
