"""Addresses of the console's lists: a path with its query, and the address of the next page."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from appliance.tenancy.pages import Page


def address(path: str, **asked: str) -> str:
    """Return `path` with the query `asked`, without empty values."""
    query = urlencode({name: value for name, value in asked.items() if value})
    return f"{path}?{query}" if query else path


def next_page(path: str, page: Page[Any], **asked: str) -> str | None:
    """Return the address of the page after `page`, None for the last one."""
    return address(path, **asked, cursor=page.next_cursor) if page.next_cursor else None
