"""Structured logs on stderr: coloured text on a terminal, JSON lines elsewhere."""

from __future__ import annotations

import logging
import sys

import structlog


def configure_logs(level_name: str, format_name: str, **always: object) -> None:
    """Set up structlog and route the standard library's loggers (uvicorn, asyncio) through it.

    ``always`` are fields of every line.
    """
    console = format_name == "console" or (format_name == "auto" and sys.stderr.isatty())
    level = logging.getLevelNamesMapping()[level_name.upper()]

    def add_fields(_: object, __: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**always, **line}

    shared: list[structlog.typing.Processor] = [
        add_fields,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer()]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "httpcore", "numba", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(max(level, logging.WARNING))
