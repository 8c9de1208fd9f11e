"""What engines call: attach to prepared memory, join a lease, wait for a pool."""

from hostprep.attachment.calls import attach, attach_many, join, wait
from hostprep.attachment.mapped import Attachment

__all__ = ["Attachment", "attach", "attach_many", "join", "wait"]
