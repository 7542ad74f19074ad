"""Past requests: pages of them, the newest first, optionally searched by text, and single ones by id. Reads only."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, or_, select

from appliance.base.db import Database
from appliance.base.errors import NotFound
from appliance.base.tables import api_keys, requests
from appliance.metering.ledger.records import RequestRow
from appliance.metering.ledger.rows import request_from_row
from appliance.metering.usage_queries import tenant_of_key
from appliance.tenancy.access import Access
from appliance.tenancy.pages import (
    PAGE_ROWS_DEFAULT,
    Page,
    check_limit,
    decode_cursor,
    encode_cursor,
    from_micros,
    page_of,
    to_micros,
)

SEARCHED_MAX = 100_000
"""How many requests a page searches at most: no index finds a text within a name, and a text that no request has would make it
search them all."""
_WHOLE_ID = re.compile(r"req_[0-9a-z]{26}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Which requests a page shows; None is all. `text` may be in id, model, or the key's name or prefix, in any case."""

    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    finish_reason: str | None = None
    text: str | None = None
    finished_only: bool = True


class PastRequests:
    """Reads the table of requests. Every method narrows what it reads to what `access` shows."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def page(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        filters: RequestFilter | None = None,
        *,
        access: Access,
    ) -> Page[RequestRow]:
        """Return past requests, the newest first. Raises InvalidValue for a bad cursor.

        A page searches SEARCHED_MAX requests for a text, and may have fewer rows than `limit` although more follow. A whole id
        is found at once.
        """
        columns, asked = requests.c, filters or RequestFilter()
        wanted = {columns.key_id: asked.key_id, columns.model: asked.model, columns.finish_reason: asked.finish_reason}
        behind = [] if asked.tenant_id is None else [columns.tenant_id == asked.tenant_id]
        if asked.key_id is not None and asked.tenant_id is None:
            # The index is by tenant: without this, requests of a rarely used key would be searched among everybody's.
            behind.append(columns.tenant_id == tenant_of_key(asked.key_id))
        if cursor is not None:
            micros, last_id = decode_cursor("requests", cursor, [int, str])
            moment = from_micros(micros)
            earlier = or_(columns.admitted_at < moment, and_(columns.admitted_at == moment, columns.id < last_id))
            behind += [columns.admitted_at <= moment, earlier]
        narrowed = [column == value for column, value in wanted.items() if value is not None]
        if asked.finished_only:
            narrowed.append(columns.finished_at.is_not(None))
        if asked.text:
            narrowed.append(_mentions(asked.text))
        query = access.narrow(select(requests), columns.tenant_id).where(*behind, *narrowed)
        query = query.order_by(columns.admitted_at.desc(), columns.id.desc())
        unseen_at = None
        async with self._db.reading() as connection:
            if asked.text and not _is_whole_id(asked.text):
                admitted = access.narrow(select(columns.admitted_at), columns.tenant_id).where(*behind)
                unseen_at = (await connection.execute(_beyond(admitted))).scalar_one_or_none()
            if unseen_at is not None:
                query = query.where(columns.admitted_at > unseen_at)
            rows = (await connection.execute(query.limit(check_limit(limit) + 1))).mappings().all()
        found = [request_from_row(row) for row in rows]
        page = page_of(found, limit, "requests", lambda row: [to_micros(row.admitted_at), row.id])
        if unseen_at is None or page.has_more:
            return page
        return replace(page, next_cursor=encode_cursor("requests", [to_micros(unseen_at) + 1, ""]))

    async def get(self, request_id: str, *, access: Access) -> RequestRow:
        """Return a request. Raises NotFound, also for another tenant's."""
        query = access.narrow(select(requests), requests.c.tenant_id).where(requests.c.id == request_id)
        async with self._db.reading() as connection:
            row = (await connection.execute(query)).mappings().first()
        if row is None:
            raise NotFound("no such request", param="request_id")
        return request_from_row(row)


def _mentions(text: str) -> ColumnElement[bool]:
    """Return the condition that a request has `text`, in any case, in its id, its model, or its key's name or prefix."""
    if _is_whole_id(text):
        return requests.c.id == text
    columns = (requests.c.id, requests.c.model)
    keys = select(api_keys.c.id).where(
        or_(*(column.icontains(text, autoescape=True) for column in (api_keys.c.name, api_keys.c.prefix)))
    )
    return or_(*(column.icontains(text, autoescape=True) for column in columns), requests.c.key_id.in_(keys))


def _is_whole_id(text: str) -> bool:
    """Return whether `text` is the whole id of a request, which an index finds however old it is."""
    return _WHOLE_ID.fullmatch(text) is not None


def _beyond(admitted: Select[Any]) -> Select[Any]:
    """Return the query for the latest moment, of those in `admitted`, that a page no longer searches."""
    return admitted.order_by(requests.c.admitted_at.desc()).offset(SEARCHED_MAX).limit(1)
