"""Logs with keys, on standard error: for people on a console, JSON for collectors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, Protocol, cast

__all__ = ["FORMATS", "Logger", "make_logger"]

FORMATS = ("console", "json")


class Logger(Protocol):
    """What the agent's parts use of a logger."""

    def info(self, event: str, **keys: Any) -> Any:
        """Say that something happened."""

    def warning(self, event: str, **keys: Any) -> Any:
        """Say that something is not as it should be, and is dealt with."""

    def error(self, event: str, **keys: Any) -> Any:
        """Say that something failed."""


class _Unhurried:
    """A logger that is made for the first line: reading structlog takes a tenth of a start."""

    def __init__(self, make: Callable[[], Logger]) -> None:
        self._make = make

    @cached_property
    def _logger(self) -> Logger:
        return self._make()

    def info(self, event: str, **keys: Any) -> Any:
        return self._logger.info(event, **keys)

    def warning(self, event: str, **keys: Any) -> Any:
        return self._logger.warning(event, **keys)

    def error(self, event: str, **keys: Any) -> Any:
        return self._logger.error(event, **keys)


def make_logger(style: str, level: str = "info", **keys: str) -> Logger:
    """Return a logger that writes lines of that level and up in that style, with these keys."""
    return _Unhurried(partial(_structured, style, level, keys))


def _structured(style: str, level: str, keys: Mapping[str, str]) -> Logger:
    import structlog

    renderer: structlog.typing.Processor
    if style == "json":
        renderer = structlog.processors.JSONRenderer(sort_keys=True)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    logger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
    )
    return cast("Logger", logger.bind(**keys))
