"""Every error a user can meet: a reason for machines, a sentence for people, the next step."""

from __future__ import annotations


class HostprepError(Exception):
    """Base of all our errors.

    `reason` is CamelCase and stable: it becomes a condition's reason and a metric's label.
    `remedy` says what to do next, in words for a person. `exit_code` is the program's.
    """

    exit_code = 1
    default_reason = "Failed"

    def __init__(
        self, message: str, *, reason: str | None = None, remedy: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.remedy = remedy

    def to_json(self) -> dict[str, str | None]:
        """Return the error for programs."""
        return {"error": self.message, "reason": self.reason, "remedy": self.remedy}

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class BadInputError(HostprepError):
    """What was asked for makes no sense or may not be: nothing was changed."""

    exit_code = 2
    default_reason = "BadInput"


class NotReadyError(HostprepError):
    """Memory is not there, or not as it was promised: never a guess."""

    default_reason = "NotReady"


class NotReadableError(NotReadyError):
    """A file that others may write holds something else than it should."""

    default_reason = "NotReadable"


class BusyError(HostprepError):
    """Others hold what was asked for, and the time to wait is over."""

    default_reason = "Busy"


class FailedError(HostprepError):
    """The system refused something that should have worked."""

    default_reason = "Failed"
