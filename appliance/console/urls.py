"""URLs of the console's lists: a path with a query string, and the URL of the next page."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from appliance.tenancy.pages import Page


def build_url(path: str, **parameters: str) -> str:
    """Return `path` with `parameters` as its query string; empty values are left out."""
    query = urlencode({name: value for name, value in parameters.items() if value})
    return f"{path}?{query}" if query else path


def next_page_url(path: str, page: Page[Any], **parameters: str) -> str | None:
    """Return the URL of the page after `page`, None after the last one."""
    return build_url(path, **parameters, cursor=page.next_cursor) if page.next_cursor else None
