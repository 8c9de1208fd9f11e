"""What engines import ahead of a timed `hostprep.attach`: the code is in `hostprep.client`."""

from hostprep.client.attach import Attachment, attach, attach_many, join, wait

__all__ = ["Attachment", "attach", "attach_many", "join", "wait"]
