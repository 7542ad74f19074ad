"""Progress output: one live line per step on a terminal; elsewhere a line at the start, at the end, and
every _LINE_INTERVAL_S in between."""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

_REDRAW_S = 0.1
_LINE_INTERVAL_S = 15.0


class Step:
    """One step of the work. Use as a context manager; call `detail` as often as progress changes."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream if stream is not None else sys.stdout
        self._live = self._stream.isatty()
        self._started = 0.0
        self._drawn = 0.0
        self._outcome = ""

    def __enter__(self) -> Step:
        self._started = self._drawn = time.monotonic()
        if self._live:
            self._draw("")
        else:
            self._say(f"{self._title} ...")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        seconds = time.monotonic() - self._started
        word = "failed" if kind is not None else self._outcome or "done"
        if self._live:
            self._stream.write("\r\x1b[K")
        self._say(f"{self._title}: {word} ({seconds:.0f} s)")

    def detail(self, text: str) -> None:
        """Show `text` next to the title: at once on a terminal, elsewhere as a line every _LINE_INTERVAL_S."""
        now = time.monotonic()
        if now - self._drawn < (_REDRAW_S if self._live else _LINE_INTERVAL_S):
            return
        self._drawn = now
        if self._live:
            self._draw(text)
        else:
            self._say(f"{self._title}: {text} ({now - self._started:.0f} s)")

    def outcome(self, text: str) -> None:
        """Set the result shown in the closing line; default: done."""
        self._outcome = text

    def _draw(self, text: str) -> None:
        seconds = time.monotonic() - self._started
        line = f"{self._title}: {text} ({seconds:.0f} s)" if text else f"{self._title} ..."
        width = max(20, shutil.get_terminal_size().columns - 1)
        self._stream.write("\r\x1b[K" + line[:width])
        self._stream.flush()

    def _say(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()
