"""Logging of the appliance: structured lines on standard error, as JSON or as text for a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO, cast

import structlog

# Without local variables: they include keys, tokens and prompts.
_PLAIN_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


def configure_logging(level: str, *, json: bool) -> None:
    """Send structlog and the standard library's loggers to standard error from `level` (debug, info, warning, error) up.

    Values bound with `structlog.contextvars.bind_contextvars(request_id=…)` are added to every line of that task.
    """
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Any] = (
        [_PLAIN_TRACEBACKS, structlog.processors.JSONRenderer()]
        if json
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    )
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
        cache_logger_on_first_use=False,
    )
    _route_standard_library(number, shared, last)


class _StandardError:
    """Looks up `sys.stderr` at every write: while a progress bar is shown, it is replaced by a stream that prints above it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _route_standard_library(number: int, shared: list[Any], last: list[Any]) -> None:
    """Format the log lines of libraries (uvicorn, alembic) in the same way. uvicorn's access log is off: we write our own."""
    handler = logging.StreamHandler(cast(TextIO, _StandardError()))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    access = logging.getLogger("uvicorn.access")
    access.handlers.clear()
    access.propagate = False
    # httpx logs every request with its whole URL at info, httpcore at debug; the path of a webhook can be its secret.
    for name in ("alembic", "sqlalchemy", "aiosqlite", "asyncio", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
