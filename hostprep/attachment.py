"""What engines import ahead of a timed `hostprep.attach`: the code is in `hostprep.client`."""

from hostprep.client.attach import attach, attach_many, join, wait
from hostprep.client.attachment import Attachment

__all__ = ["Attachment", "attach", "attach_many", "join", "wait"]
