"""What can go wrong with the API server, as the operator tells it apart."""

from __future__ import annotations

from hostprep.errors import FailedError

__all__ = [
    "ApiError",
    "ConflictError",
    "ExpiredError",
    "RefusedError",
    "TooManyError",
    "UnreachableError",
]


class ApiError(FailedError):
    """Base of what the API server, or the way to it, can answer."""

    default_reason = "ApiError"
    retry_after_s: float = 0.0
    """Seconds that the server asks us to wait before the next try."""


class ConflictError(ApiError):
    """409: the object is not what it was when it was read, or it exists already."""

    default_reason = "Conflict"


class ExpiredError(ApiError):
    """410: the list's continue token is too old; the list starts again."""

    default_reason = "Expired"


class RefusedError(ApiError):
    """400, 401, 403, 422 and the like: the same request will be refused again."""

    default_reason = "Refused"


class TooManyError(ApiError):
    """429, and 503 with Retry-After: the server asks for patience."""

    default_reason = "TooMany"


class UnreachableError(ApiError):
    """No answer: connection refused, cut or too slow, or 5xx."""

    default_reason = "Unreachable"
