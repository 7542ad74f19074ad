"""The search of past requests for a text: what a request is found by, and how far back one page of results looks."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import ColumnElement, Select, or_, select

from appliance.base.tables import api_keys, requests

SEARCHED_MAX = 100_000
"""Requests that a page looks through. No index finds a text within a name, and a text that nobody has is nowhere."""
_WHOLE_ID = re.compile(r"req_[0-9a-z]{26}")


def mentions(text: str) -> ColumnElement[bool]:
    """Return the condition that a request has `text`, in any case, in its id, its model, or its key's name or prefix."""
    if is_whole_id(text):
        return requests.c.id == text
    columns = (requests.c.id, requests.c.model)
    keys = select(api_keys.c.id).where(
        or_(*(column.icontains(text, autoescape=True) for column in (api_keys.c.name, api_keys.c.prefix)))
    )
    return or_(*(column.icontains(text, autoescape=True) for column in columns), requests.c.key_id.in_(keys))


def is_whole_id(text: str) -> bool:
    """Return whether `text` is the whole id of a request, which an index finds however old it is."""
    return _WHOLE_ID.fullmatch(text) is not None


def beyond(admitted: Select[Any]) -> Select[Any]:
    """Return the query for the latest moment that a page does not look at, of those that `admitted` asks for."""
    return admitted.order_by(requests.c.admitted_at.desc()).offset(SEARCHED_MAX).limit(1)
