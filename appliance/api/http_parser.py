"""httptools' parser, made to ignore Upgrade headers: the JDK's client sends `Upgrade: h2c` with every clear-text request.

A server may ignore the header and respond in HTTP/1.1 (RFC 9110, section 7.8). httptools cannot: it stops after the head of
such a request, and the body would be lost. So the head is parsed again without the header, followed by the remaining data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools


class UpgradeIgnoringParser:
    """Calls `protocol`, an object with httptools' callbacks. When it stops at an Upgrade header, `head_without_upgrade` returns
    the head without it, or None if there is none (the method CONNECT): then HttpParserUpgrade is raised as usual."""

    def __init__(self, protocol: object, head_without_upgrade: Callable[[], bytes | None]) -> None:
        self._protocol = protocol
        self._head_without_upgrade = head_without_upgrade
        self._parser = self._new_parser()

    def feed_data(self, data: bytes) -> None:
        """Parse `data`. Raises HttpParserError and HttpParserUpgrade."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head = self._head_without_upgrade()
                if head is None:
                    raise
                data = head + data[upgrade.args[0] :]
                self._parser = self._new_parser()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self._protocol)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets it
        return parser
