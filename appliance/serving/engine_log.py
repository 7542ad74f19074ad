"""Copies an engine's output into the gateway's log, each line at the level that the engine logged it with. Knows no process."""

from __future__ import annotations

import asyncio
import logging
import re

import structlog

LINE_BYTES_MAX = 8192
ENGINE = "gatehouse.engine"
_LINE = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<logger>[\w.]+) (?P<text>.*)", re.DOTALL)

log = structlog.get_logger()


async def forward_log(output: asyncio.StreamReader, *, model: str, pid: int) -> None:
    """Copy `output` to its end; lines over LINE_BYTES_MAX are split.

    A line without a level gets that of the line before it, as in a traceback. Before the first level it is a warning.
    """
    level, logger = logging.WARNING, ENGINE
    while True:
        try:
            line = await output.readuntil(b"\n")
        except asyncio.IncompleteReadError as ending:
            line = ending.partial
            if not line:
                return
        except asyncio.LimitOverrunError:
            line = await output.read(LINE_BYTES_MAX)
        text = line.decode("utf-8", "replace").rstrip()
        if match := _LINE.fullmatch(text):
            level, logger, text = logging.getLevelNamesMapping()[match["level"]], match["logger"], match["text"]
        if text:
            fields = {} if logger == ENGINE else {"logger": logger}
            log.log(level, text, role="engine", model=model, pid=pid, **fields)
