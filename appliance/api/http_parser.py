"""httptools' parser for clients that offer another protocol: the JDK's client offers h2c with each request in clear text.

A server may ignore the offer and answer in HTTP/1.1 (RFC 9110, section 7.8). The parser cannot: it stops after the head of a
request with an offer, and the body would be lost. So the head is parsed once more without the offer, followed by the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools


class UpgradeIgnoringParser:
    """Parses for `protocol`, the object with httptools' callbacks. When it stops at an offer, `head` returns the head without
    it, or None when there is no offer to ignore (the method CONNECT): then HttpParserUpgrade is raised as usual."""

    def __init__(self, protocol: object, head: Callable[[], bytes | None]) -> None:
        self._protocol = protocol
        self._head = head
        self._parser = self._new()

    def feed_data(self, data: bytes) -> None:
        """Parse `data`. Raises HttpParserError and HttpParserUpgrade."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                head = self._head()
                if head is None:
                    raise
                data = head + data[stop.args[0] :]
                self._parser = self._new()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        return parser
