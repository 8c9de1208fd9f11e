"""Logs with keys, on standard error: for people on a console, JSON for collectors."""

from __future__ import annotations

import sys
from typing import Any, Protocol, cast

import structlog

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


def make_logger(style: str, level: str = "info", **keys: str) -> Logger:
    """Return a logger that writes lines of that level and up in that style, with these keys."""
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
