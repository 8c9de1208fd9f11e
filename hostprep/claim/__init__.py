"""Taking regions: who waits, who holds, what is clean, and how it becomes clean again."""

from hostprep.claim.claims import claim
from hostprep.claim.lease import Lease, join_lease
from hostprep.claim.owner import Owner
from hostprep.claim.request import Request

__all__ = ["Lease", "Owner", "Request", "claim", "join_lease"]
