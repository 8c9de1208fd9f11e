"""Errors of requests to the API server, by type.

The reasons are label values of the operator's metrics: they stay as they are.
"""

from __future__ import annotations

import contextlib
import json

from hostprep.errors import FailedError

_MAX_ANSWER = 500
_MAX_RETRY_AFTER_S = 30.0


class ApiError(FailedError):
    """The base class."""

    default_reason = "ApiError"

    def __init__(
        self, answer: str, *, request: str = "", status: int = 0, retry_after_s: float = 0.0
    ) -> None:
        answer = answer[:_MAX_ANSWER]
        super().__init__(f"{request}: {answer}" if request else answer)
        self.answer = answer
        """The server's message, or what broke on the way."""
        self.status = status
        """HTTP status; 0 where no answer came."""
        self.retry_after_s = retry_after_s
        """Seconds that the server asks to wait before the next try; 0 where it does not."""

    @property
    def summary(self) -> str:
        """The answer with its HTTP status, without the request."""
        return f"HTTP {self.status}: {self.answer}" if self.status else self.answer


class NotFoundError(ApiError):
    """404 of the API itself: there is no such object."""

    default_reason = "NotFound"


class ConflictError(ApiError):
    """409: the object is not what it was when it was read, or it exists already."""

    default_reason = "Conflict"


class GoneError(ApiError):
    """410: a continue token or a version to watch from is too old; read the list again."""

    default_reason = "Expired"


class RefusedError(ApiError):
    """400, 422 and the like: the same request will be refused again."""

    default_reason = "Refused"


class UnauthorizedError(RefusedError):
    """401: the credentials are not, or no longer, accepted."""


class ForbiddenError(RefusedError):
    """403: a right is missing."""


class NoSuchResourceError(RefusedError):
    """404 of the router: the kind is unknown, since its definition is not there (yet)."""

    default_reason = "NoSuchResource"


class ThrottledError(ApiError):
    """429, and 503 with Retry-After: the server asks to wait."""

    default_reason = "TooMany"


class UnreachableError(ApiError):
    """No answer: connection refused, cut or too slow; or 5xx, or an answer of no API server."""

    default_reason = "Unreachable"


_BY_STATUS: dict[int, type[ApiError]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    409: ConflictError,
    410: GoneError,
    429: ThrottledError,
}


def error_of(status: int, body: bytes, *, request: str = "", retry_after: str = "") -> ApiError:
    """Return the error for an answer with a status of 400 or more."""
    retry_after_s = 0.0
    if status == 404:
        # A router's 404 is plain text. Taking it for "the object does not exist", while its
        # CustomResourceDefinition is not served yet, would release memory.
        is_object = body.lstrip().startswith(b"{")
        kind: type[ApiError] = NotFoundError if is_object else NoSuchResourceError
    elif status == 429 or (status == 503 and retry_after):
        kind, retry_after_s = ThrottledError, _seconds(retry_after)
    else:
        default = RefusedError if 400 <= status < 500 else UnreachableError
        kind = _BY_STATUS.get(status, default)
    return kind(_message(body), request=request, status=status, retry_after_s=retry_after_s)


def _message(body: bytes) -> str:
    """Return the message of a Status, or all of another text."""
    with contextlib.suppress(ValueError, RecursionError):
        document = json.loads(body)
        if isinstance(document, dict) and document.get("message"):
            return str(document["message"])
    return " ".join(body.decode(errors="replace").split()) or "no reason given"


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.1), _MAX_RETRY_AFTER_S)
    except ValueError:
        return 1.0
