"""Query parameters and lists of OpenAI's organization API, which uses Unix seconds, and ids as cursors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Generic, TypeVar

import msgspec

from appliance.api.queries import AdminRequest, integer
from appliance.tenancy.pages import encode_cursor

SECONDS_MAX = 253_402_300_799  # the last second of the year 9999
LIMIT_DEFAULT = 20
LIMIT_MAX = 100

S = TypeVar("S")
T = TypeVar("T")


class ListShape(msgspec.Struct, Generic[S], kw_only=True):
    """A page of a list."""

    data: list[S]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class DeletedShape(msgspec.Struct, kw_only=True):
    """Confirmation that an object was deleted."""

    id: str
    object: str
    deleted: bool = True


def list_shape(rows: Sequence[T], shape: Callable[[T], S], id_of: Callable[[S], str], *, has_more: bool) -> ListShape[S]:
    """Return a page of `rows`, each converted by `shape`, with the ids of the first and last row."""
    data = [shape(row) for row in rows]
    first, last = (id_of(data[0]), id_of(data[-1])) if data else (None, None)
    return ListShape(data=data, first_id=first, last_id=last, has_more=has_more)


def page_limit(request: AdminRequest, default: int = LIMIT_DEFAULT, maximum: int = LIMIT_MAX) -> int:
    """Return the parameter `limit`. Raises InvalidValue unless it is from 1 to `maximum`."""
    limit = integer(request, "limit", 1, maximum)
    return default if limit is None else limit


def after_cursor(request: AdminRequest, name: str) -> str | None:
    """Return the cursor of the list `name` after the row whose id is the parameter `after`, or None."""
    row_id = request.query_params.get("after")
    return None if row_id is None else encode_cursor(name, [row_id])


def seconds(request: AdminRequest, name: str) -> datetime | None:
    """Return the time of a parameter in Unix seconds, or None if it is missing. Raises InvalidValue."""
    value = integer(request, name, 0, SECONDS_MAX)
    return None if value is None else datetime.fromtimestamp(value, UTC)


def unix(moment: datetime) -> int:
    """Return `moment` in Unix seconds, rounded down."""
    return int(moment.timestamp() // 1)


def optional_unix(moment: datetime | None) -> int | None:
    """Return `moment` in Unix seconds, or None."""
    return None if moment is None else unix(moment)
