"""Describes the device of a session by its User-Agent header. Only a hint for its owner: clients can send any text."""

from __future__ import annotations

import re

UNKNOWN = "Unknown device"
_NAME_CHARS_MAX = 40
# The first match wins, because an entry's user agent may also contain the names of entries further down.
_BROWSERS = (
    ("Edge", r"\bEdg(?:e|A|iOS)?/"),
    ("Opera", r"\b(?:OPR|Opera)/"),
    ("Samsung Internet", r"\bSamsungBrowser/"),
    ("Firefox", r"\b(?:Firefox|FxiOS)/"),
    ("Chrome", r"\b(?:Chrome|CriOS|HeadlessChrome)/"),
    ("Safari", r"\bSafari/"),
)
_SYSTEMS = (
    ("iPhone", r"\biPhone\b"),
    ("iPad", r"\biPad\b"),
    ("Android", r"\bAndroid\b"),
    ("Windows", r"\bWindows\b"),
    ("macOS", r"\bMac OS X\b|\bMacintosh\b"),
    ("ChromeOS", r"\bCrOS\b"),
    ("Linux", r"\bLinux\b|\bX11\b"),
)


def device_of(user_agent: str) -> str:
    """Return a description like `Firefox on Linux`; for a program that is not a browser, its product name."""
    browser, system = _first(_BROWSERS, user_agent), _first(_SYSTEMS, user_agent)
    if browser and system:
        return f"{browser} on {system}"
    if browser or system:
        return str(browser or system)
    name = re.match(r"[^\s/;()]+", user_agent)
    return name[0][:_NAME_CHARS_MAX] if name else UNKNOWN


def _first(names: tuple[tuple[str, str], ...], user_agent: str) -> str | None:
    return next((name for name, pattern in names if re.search(pattern, user_agent)), None)
