"""Reads past requests: pages, newest first, with filters and text search, and single requests by id."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, RowMapping, Select, and_, or_, select

from appliance.base.db import Database
from appliance.base.errors import NotFound
from appliance.base.tables import api_keys, requests
from appliance.metering.ledger.rows import DURATIONS, MICROS_PER_S
from appliance.metering.usage_queries import tenant_id_of_key
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
"""The most requests that a page searches for a text: no index serves substring search, so a text that matches nothing would
scan them all."""
_COMPLETE_ID = re.compile(r"req_[0-9a-z]{26}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRequest:
    """A request as shown by the console and `/admin/v1/requests`. `finished_at` is None until it is settled."""

    id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    stream: bool
    batch: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kv_blocks: int
    preemptions: int
    tenant_open: int | None
    awaited_limit: str | None
    batch_size_mean: float | None
    finish_reason: str | None
    error: str | None
    admission_wait_s: float | None
    queue_s: float | None
    ttft_s: float | None
    inter_token_p50_s: float | None
    decode_s: float | None
    tokens_per_second: float | None
    admitted_at: datetime
    first_token_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFilter:
    """Filters; None matches all. `text` is a case-insensitive substring of the id, the model, or the key's name or prefix."""

    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    finish_reason: str | None = None
    text: str | None = None
    finished_only: bool = True


class PastRequests:
    """Reads the table of requests. Every method reads only what `access` may see."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def page(
        self,
        limit: int = PAGE_ROWS_DEFAULT,
        cursor: str | None = None,
        filters: RequestFilter | None = None,
        *,
        access: Access,
    ) -> Page[PastRequest]:
        """Return past requests, newest first. Raises InvalidValue for a bad cursor.

        A text search examines SEARCHED_MAX requests per page, so a page may have fewer than `limit` rows although more follow.
        A complete request id is looked up directly.
        """
        columns, filters = requests.c, filters or RequestFilter()
        equal = {columns.key_id: filters.key_id, columns.model: filters.model, columns.finish_reason: filters.finish_reason}
        conditions = [] if filters.tenant_id is None else [columns.tenant_id == filters.tenant_id]
        if filters.key_id is not None and filters.tenant_id is None:
            # The index begins with the tenant: without this, a rarely used key would be searched among all tenants' requests.
            conditions.append(columns.tenant_id == tenant_id_of_key(filters.key_id))
        if cursor is not None:
            micros, last_id = decode_cursor("requests", cursor, [int, str])
            moment = from_micros(micros)
            earlier = or_(columns.admitted_at < moment, and_(columns.admitted_at == moment, columns.id < last_id))
            conditions += [columns.admitted_at <= moment, earlier]
        field_conditions = [column == value for column, value in equal.items() if value is not None]
        if filters.finished_only:
            field_conditions.append(columns.finished_at.is_not(None))
        if filters.text:
            field_conditions.append(_matches_text(filters.text))
        query = access.narrow(select(requests), columns.tenant_id).where(*conditions, *field_conditions)
        query = query.order_by(columns.admitted_at.desc(), columns.id.desc())
        search_end_at = None
        async with self._db.reading() as connection:
            if filters.text and not _is_complete_id(filters.text):
                admitted = access.narrow(select(columns.admitted_at), columns.tenant_id).where(*conditions)
                search_end_at = (await connection.execute(_search_end_query(admitted))).scalar_one_or_none()
            if search_end_at is not None:
                query = query.where(columns.admitted_at > search_end_at)
            rows = (await connection.execute(query.limit(check_limit(limit) + 1))).mappings().all()
        found = [_from_row(row) for row in rows]
        page = page_of(found, limit, "requests", lambda row: [to_micros(row.admitted_at), row.id])
        if search_end_at is None or page.has_more:
            return page
        return replace(page, next_cursor=encode_cursor("requests", [to_micros(search_end_at) + 1, ""]))

    async def get(self, request_id: str, *, access: Access) -> PastRequest:
        """Return a request. Raises NotFound, also for another tenant's request."""
        query = access.narrow(select(requests), requests.c.tenant_id).where(requests.c.id == request_id)
        async with self._db.reading() as connection:
            row = (await connection.execute(query)).mappings().first()
        if row is None:
            raise NotFound("no such request", param="request_id")
        return _from_row(row)


def _matches_text(text: str) -> ColumnElement[bool]:
    """Return the condition that id, model, or the key's name or prefix contains `text`, ignoring case."""
    if _is_complete_id(text):
        return requests.c.id == text
    columns = (requests.c.id, requests.c.model)
    keys = select(api_keys.c.id).where(
        or_(*(column.icontains(text, autoescape=True) for column in (api_keys.c.name, api_keys.c.prefix)))
    )
    return or_(*(column.icontains(text, autoescape=True) for column in columns), requests.c.key_id.in_(keys))


def _is_complete_id(text: str) -> bool:
    """Return whether `text` is a complete request id, which is looked up by an index whatever its age."""
    return _COMPLETE_ID.fullmatch(text) is not None


def _search_end_query(admitted: Select[Any]) -> Select[Any]:
    """Return the query for the admission time of the first request beyond the SEARCHED_MAX that a page searches."""
    return admitted.order_by(requests.c.admitted_at.desc()).offset(SEARCHED_MAX).limit(1)


_FIELDS = tuple(field.name for field in fields(PastRequest))


def _from_row(row: RowMapping) -> PastRequest:
    """Return the past request of a row of `requests`."""
    values: dict[str, Any] = {name: row[name] for name in _FIELDS if name in row}
    values |= {f"{name}_s": _seconds(row[f"{name}_us"]) for name in DURATIONS}
    return PastRequest(**values, tokens_per_second=tokens_per_second(row["completion_tokens"], values["decode_s"]))


def tokens_per_second(completion_tokens: int, decode_s: float | None) -> float | None:
    """Return the decode speed: tokens after the first divided by the decode time. None without a second token."""
    return (completion_tokens - 1) / decode_s if decode_s and completion_tokens > 1 else None


def _seconds(micros: int | None) -> float | None:
    return None if micros is None else micros / MICROS_PER_S
