"""Keyset pagination: pages of a list and opaque cursors. Knows no table."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from sqlalchemy import Column, RowMapping, Select

from appliance.base.db import Database
from appliance.base.errors import InvalidValue
from appliance.tenancy.fields import check_whole

PAGE_ROWS_DEFAULT = 50
PAGE_ROWS_MAX = 1000
CURSOR_CHARS_MAX = 4096
"""More than the longest position needs: several names of 200 four-byte characters, in base64."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A page of a list. `next_cursor` is None on the last page."""

    data: list[T]
    next_cursor: str | None

    @property
    def has_more(self) -> bool:
        """Return whether there is another page."""
        return self.next_cursor is not None


def check_limit(limit: int) -> int:
    """Return `limit`; raise InvalidValue unless it is 1..PAGE_ROWS_MAX."""
    return check_whole(limit, "limit", 1, PAGE_ROWS_MAX)


def encode_cursor(name: str, position: Sequence[str | int]) -> str:
    """Return the cursor that continues the list `name` after the row with the sort key `position`."""
    text = json.dumps([name, *position], ensure_ascii=False, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode(errors="surrogatepass")).decode().rstrip("=")


def decode_cursor(name: str, cursor: str, types: Sequence[type]) -> list[Any]:
    """Return the position encoded in `cursor`. Raises InvalidValue unless it belongs to the list `name` and has these types."""
    refusal = InvalidValue("invalid cursor for this list", param="cursor")
    if not isinstance(cursor, str) or not 0 < len(cursor) <= CURSOR_CHARS_MAX or not cursor.isascii():
        raise refusal
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        values = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):
        raise refusal from None
    if not isinstance(values, list) or [type(value) for value in values] != [str, *types] or values[0] != name:
        raise refusal
    if any(isinstance(value, int) and abs(value) >= 2**63 for value in values):
        raise refusal
    if any(isinstance(value, str) and not _is_storable(value) for value in values):
        raise refusal
    return values[1:]


def to_micros(moment: datetime) -> int:
    """Return a time as the integer stored in cursors: microseconds since 1970."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def from_micros(micros: int) -> datetime:
    """Return the time of a cursor. Raises InvalidValue if it is out of range."""
    try:
        return _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        raise InvalidValue("cursor does not belong to this list", param="cursor") from None


def _is_storable(text: str) -> bool:
    """Return whether every database can store `text`: without NUL and lone surrogates."""
    return not any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text)


def page_of(rows: Sequence[T], limit: int, name: str, position_of: Callable[[T], Sequence[str | int]]) -> Page[T]:
    """Build a page from the result of a query with `limit + 1` rows: the extra row means that there is a next page."""
    data = list(rows[:limit])
    return Page(data=data, next_cursor=encode_cursor(name, position_of(data[-1])) if len(rows) > limit else None)


async def read_page(
    db: Database,
    name: str,
    query: Select[Any],
    key: Column[Any],
    limit: int,
    cursor: str | None,
    value_of: Callable[[RowMapping], T],
    *,
    newest_first: bool = False,
) -> Page[T]:
    """Return a page of the list `name`: the rows of `query`, converted by `value_of` and sorted by `key`, their id column.

    Raises InvalidValue for an invalid limit or cursor.
    """
    query = query.order_by(key.desc() if newest_first else key).limit(check_limit(limit) + 1)
    if cursor is not None:
        (last_id,) = decode_cursor(name, cursor, [str])
        query = query.where(key < last_id if newest_first else key > last_id)
    async with db.reading() as connection:
        rows = (await connection.execute(query)).mappings().all()
    page = page_of(rows, limit, name, lambda row: [row[key.name]])
    return Page(data=[value_of(row) for row in page.data], next_cursor=page.next_cursor)


async def read_every_page(read: Callable[[int, str | None], Awaitable[Page[T]]]) -> list[T]:
    """Return all rows of a list; `read(limit, cursor)` returns the page after a cursor."""
    page = await read(PAGE_ROWS_MAX, None)
    rows = page.data
    while page.next_cursor is not None:
        page = await read(PAGE_ROWS_MAX, page.next_cursor)
        rows += page.data
    return rows
