"""Log lines with keys: JSON for machines, columns for people. Kopf's lines take the same form."""

from __future__ import annotations

import logging
import sys

import structlog
from structlog.typing import Processor

__all__ = ["set_up_logs"]


def set_up_logs(*, as_json: bool, level: str) -> None:
    """Send everything to stderr; kopf's and the client's only from warnings up."""
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        shared.append(structlog.processors.format_exc_info)
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
    render: Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=render)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("kopf", "kubernetes", "aiohttp", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
