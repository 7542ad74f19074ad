"""`/admin/v1/usage`, `/costs`, `/ledger` and `/prices`: usage reports, usage events and their corrections, prices."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec
from litestar import delete, get, post
from litestar.params import FromPath

from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body
from appliance.api.connection_services import services_of
from appliance.api.field_types import Currency, Name, Percent, Timestamp, UnitPrice, chars, entries, within
from appliance.api.queries import ORDERS, PAGING, AdminRequest, choice, paging, parse_timestamp, timestamp, values
from appliance.api.shapes import (
    LedgerEventShape,
    PageShape,
    PriceShape,
    UsageRowShape,
    ledger_event_shape,
    page_shape,
    usage_row_shape,
)
from appliance.base.digits import whole_number
from appliance.base.errors import NotFound
from appliance.base.money import PERCENT_MAX
from appliance.metering.ledger.corrections import KEY_HEADER, NOTE_CHARS_MAX, TOKENS_MAX, Correction
from appliance.metering.ledger.records import KINDS
from appliance.metering.ledger.rows import COST_PICOS_MAX
from appliance.metering.usage import BUCKETS, STATUSES, LedgerFilter, UsageFilter
from appliance.tenancy.fields import TIERS
from appliance.tenancy.pages import PAGE_ROWS_MAX
from appliance.tenancy.roles import Action

EVENT_ID_DIGITS_MAX = 18
PERIOD_DEFAULT = timedelta(days=30)
LEDGER_QUERY = (*PAGING, "tenant_id", "key_id", "model", "kind", "status", "request_id", "start", "end", "order")
REPEATABLE = ("group_by", "key_id", "model")
USAGE_QUERY = ("start", "end", "bucket", "tenant_id", *REPEATABLE, *PAGING)
USAGE_OPTIONS = {"query": USAGE_QUERY, "repeatable": REPEATABLE}


SignedTokens = Annotated[int, within(-TOKENS_MAX, TOKENS_MAX)]


class NewPriceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A price to add, in micro-units of the currency per million tokens: 150000 is 0.15 per million."""

    model: Name
    prompt: UnitPrice
    completion: UnitPrice
    cached_prompt: UnitPrice | None = None
    effective_from: Timestamp | None = None
    currency: Currency | None = None
    rejected_draft: UnitPrice = 0
    batch_percent: Percent = PERCENT_MAX
    tier_percents: Annotated[dict[str, Percent], entries(len(TIERS), propertyNames={"enum": list(TIERS)})] | None = None


class CorrectionBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A correction of a usage event: signed token counts, charged at the event's own price, or a signed amount of money."""

    note: Annotated[str, chars(1, NOTE_CHARS_MAX)]
    prompt_tokens: SignedTokens = 0
    cached_tokens: SignedTokens = 0
    completion_tokens: SignedTokens = 0
    rejected_tokens: SignedTokens = 0
    cost_picos: Annotated[int, within(-COST_PICOS_MAX, COST_PICOS_MAX)] | None = None
    confirm: bool = False


@get("/usage", summary="List usage and cost by period", opt=USAGE_OPTIONS)
async def list_usage(request: AdminRequest) -> PageShape[UsageRowShape]:
    """Return tokens, requests and cost by period and group; by default for the last 30 days, by day and without groups."""
    return await _usage(request)


@get("/costs", summary="List cost by period", opt=USAGE_OPTIONS)
async def list_costs(request: AdminRequest) -> PageShape[UsageRowShape]:
    """Return the same rows as `/admin/v1/usage`: cost, with the tokens that caused it."""
    return await _usage(request)


@get("/ledger", summary="List usage events", opt={"query": LEDGER_QUERY})
async def list_ledger(request: AdminRequest) -> PageShape[LedgerEventShape]:
    """Return the usage events of the ledger in the order in which they were created, oldest first unless `order` is `desc`."""
    access = await authenticate_administrator(request, Action.READ)
    filters = LedgerFilter(
        tenant_id=request.query_params.get("tenant_id"),
        key_id=request.query_params.get("key_id"),
        model=request.query_params.get("model"),
        kind=choice(request, "kind", KINDS, None),
        status=choice(request, "status", STATUSES, None),  # type: ignore[arg-type]
        request_id=request.query_params.get("request_id"),
        start=timestamp(request, "start"),
        end=timestamp(request, "end"),
    )
    newest_first = choice(request, "order", ORDERS, "asc") == "desc"
    reports = services_of(request).reports
    page = await reports.ledger_page(*paging(request), filters, newest_first=newest_first, access=access)
    return page_shape(page, ledger_event_shape)


@post(
    "/ledger/{event_id:str}/corrections",
    summary="Correct a usage event",
    opt={"body": CorrectionBody, "headers": (KEY_HEADER,), "errors": (409,)},
)
async def create_correction(request: AdminRequest, event_id: FromPath[str]) -> LedgerEventShape:
    """Add an event that corrects a settled one. Both are kept; the correction is on the next invoice that is closed. A request
    that is sent again with the same `Idempotency-Key` changes nothing and gets the same response."""
    await authenticate_administrator(request, Action.BILLING)
    body = decode_body(await request.body(), CorrectionBody)
    correction = Correction(**msgspec.structs.asdict(body))
    key, corrections = request.headers.get(KEY_HEADER), services_of(request).corrections
    return ledger_event_shape(await corrections.add(_event_number(event_id), correction, idempotency_key=key))


@get("/prices", summary="List prices", opt={"query": PAGING})
async def list_prices(request: AdminRequest) -> PageShape[PriceShape]:
    """Return all prices in the order they were added, including past and future ones."""
    await authenticate_administrator(request, Action.READ_APPLIANCE)
    return page_shape(await services_of(request).prices.list(*paging(request)), PriceShape.of)


@post("/prices", summary="Add a price", opt={"body": NewPriceBody})
async def create_price(request: AdminRequest) -> PriceShape:
    """Add a price. Earlier prices are kept, and usage that is already settled keeps its cost."""
    await authenticate_administrator(request, Action.BILLING)
    body = decode_body(await request.body(), NewPriceBody)
    services = services_of(request)
    price = await services.prices.add(
        model=body.model,
        currency=services.settings.currency if body.currency is None else body.currency,
        prompt=body.prompt,
        cached_prompt=body.prompt if body.cached_prompt is None else body.cached_prompt,
        completion=body.completion,
        effective_from=None if body.effective_from is None else parse_timestamp(body.effective_from, "effective_from"),
        rejected_draft=body.rejected_draft,
        batch_percent=body.batch_percent,
        tier_percents=body.tier_percents,
    )
    return PriceShape.of(price)


@delete("/prices/{price_id:str}", status_code=200, summary="Withdraw a future price", opt={"errors": (409,)})
async def withdraw_price(request: AdminRequest, price_id: FromPath[str]) -> PriceShape:
    """Withdraw a price that takes effect in a minute or later, and return it. Otherwise 409 `price_begun`."""
    await authenticate_administrator(request, Action.BILLING)
    return PriceShape.of(await services_of(request).prices.withdraw(price_id))


async def _usage(request: AdminRequest) -> PageShape[UsageRowShape]:
    access = await authenticate_administrator(request, Action.READ)
    services = services_of(request)
    start, end = _period(request, services.clock.now())
    groups = [name for text in values(request, "group_by") or () for name in text.split(",")]
    tenant_id = request.query_params.get("tenant_id")
    filters = UsageFilter(
        tenant_ids=None if tenant_id is None else [tenant_id],
        key_ids=values(request, "key_id"),
        models=values(request, "model"),
    )
    limit, cursor = paging(request, limit_default=PAGE_ROWS_MAX)
    page = await services.reports.usage_page(
        start,
        end,
        bucket=choice(request, "bucket", BUCKETS, "day") or "day",
        group_by=groups,
        filters=filters,
        limit=limit,
        cursor=cursor,
        access=access,
    )
    return page_shape(page, usage_row_shape)


def _event_number(event_id: str) -> int:
    number = whole_number(event_id, 10**EVENT_ID_DIGITS_MAX - 1)
    if number is None:
        raise NotFound("no such event", param="event_id")
    return number


def _period(request: AdminRequest, now: datetime) -> tuple[datetime, datetime]:
    """Return the start and end of the report. The default start is PERIOD_DEFAULT before the end."""
    end = timestamp(request, "end") or now
    start = timestamp(request, "start")
    if start is None:
        earliest = datetime.min.replace(tzinfo=UTC)
        start = end - PERIOD_DEFAULT if end - earliest > PERIOD_DEFAULT else earliest
    return start, end
