"""Log lines with keys, on standard error: columns for people, JSON for collectors.

The lines of libraries (kopf, the Kubernetes client, aiohttp, gRPC) take the same form.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal, Protocol, cast

Style = Literal["console", "json"]

_LIBRARIES = ("aiohttp", "asyncio", "grpc", "kopf", "kubernetes")


class Logger(Protocol):
    """The methods of a logger that are used."""

    def info(self, event: str, **keys: Any) -> Any:
        """Log that something happened."""

    def warning(self, event: str, **keys: Any) -> Any:
        """Log that something is not as it should be, and is dealt with."""

    def error(self, event: str, **keys: Any) -> Any:
        """Log that something failed."""


def set_up_logs(*, style: Style, level: str) -> None:
    """Send lines of that level and up to standard error; libraries' only from warnings up."""
    import structlog  # late: most importers need the type of a logger only

    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: structlog.typing.Processor
    if style == "json":
        shared.append(structlog.processors.format_exc_info)
        render = structlog.processors.JSONRenderer(sort_keys=True)
    else:
        render = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=render)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)


def make_logger(name: str, **keys: str) -> Logger:
    """Return a logger of that name, each of whose lines has these keys."""
    import structlog

    return cast("Logger", structlog.get_logger(name).bind(**keys))
