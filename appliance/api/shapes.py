"""The JSON of the administrators' API, one struct per noun, and how each is made from what the other layers hold.

Times are RFC 3339 in UTC, costs are integers in pico-units, lists are pages.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

from appliance.base.clock import rfc3339
from appliance.metering.ledger.records import RequestRow, UsageEvent
from appliance.metering.prices import Price
from appliance.metering.usage import UsageRow
from appliance.serving.explanation import explain_past
from appliance.serving.live_requests import LiveRequest
from appliance.tenancy.pages import Page
from appliance.tenancy.principals import ApiKey, Limits, ModelLimits, Tenant

S = TypeVar("S")
T = TypeVar("T")


class PageShape(msgspec.Struct, Generic[S], kw_only=True):
    """A page of a list; `next_cursor` goes into `?cursor=` of the next call."""

    data: list[S]
    has_more: bool
    next_cursor: str | None


class LimitsShape(msgspec.Struct, kw_only=True):
    """Limits; null is no limit at this level. `monthly_budget` is in micro-units of money."""

    tokens_per_minute: int | None
    requests_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_day: int | None
    monthly_budget: int | None


class TenantShape(msgspec.Struct, kw_only=True):
    """A tenant."""

    id: str
    name: str
    tier: str
    weight: int
    limits: LimitsShape
    model_limits: dict[str, LimitsShape]
    limit_mode: str
    cut_at_budget: bool
    currency: str | None
    billing: dict[str, str] | None
    alert_percents: list[int] | None
    allowed_models: list[str] | None
    suspended: bool
    archived: bool
    created_at: str


class KeyShape(msgspec.Struct, kw_only=True):
    """An API key without its secret."""

    id: str
    tenant_id: str
    name: str
    prefix: str
    scopes: list[str]
    limits: LimitsShape
    model_limits: dict[str, LimitsShape]
    limit_mode: str
    expires_at: str | None
    allowed_models: list[str] | None
    allowed_networks: list[str] | None
    revoked_at: str | None
    replaced_by: str | None
    last_used_at: str | None
    created_at: str


class NewKeyShape(KeyShape, kw_only=True):
    """An API key with its secret in `key`: shown in this answer and never again."""

    key: str


class LedgerEventShape(msgspec.Struct, kw_only=True):
    """A usage event of the ledger. An adjustment names the event that it corrects; its counts and cost are signed."""

    id: str
    request_id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    kind: str
    status: str
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    estimated: bool
    batch: bool
    price_id: str | None
    cost_picos: int
    currency: str
    rejected_tokens: int
    price_basis_points: int
    cause: str | None
    billing_day: str
    posting: int | None
    corrects_id: str | None
    note: str | None
    admitted_at: str
    settled_at: str | None


class RequestShape(msgspec.Struct, kw_only=True):
    """A live or past request with its timeline. `explanation` says where the time went."""

    id: str
    tenant_id: str
    key_id: str
    model: str
    endpoint: str
    stream: bool
    batch: bool
    state: str
    queue_position: int | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kv_blocks: int
    preemptions: int
    admitted_at: str
    first_token_at: str | None
    finished_at: str | None
    queue_s: float | None
    ttft_s: float | None
    tokens_per_second: float | None
    inter_token_p50_s: float | None
    finish_reason: str | None
    error: str | None
    explanation: str


class PriceShape(msgspec.Struct, kw_only=True):
    """A price: micro-units of money per million tokens."""

    id: str
    model: str
    effective_from: str
    currency: str
    prompt: int
    cached_prompt: int
    completion: int
    rejected_draft: int
    batch_percent: int
    tier_percents: dict[str, int] | None


class UsageRowShape(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sums of one period and group; ids that were not grouped by are left out."""

    start: str
    end: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    rejected_tokens: int
    cost_picos: int
    currency: str
    tenant_id: str | msgspec.UnsetType = msgspec.UNSET
    key_id: str | msgspec.UnsetType = msgspec.UNSET
    model: str | msgspec.UnsetType = msgspec.UNSET


def page_shape(page: Page[T], shape: Callable[[T], S]) -> PageShape[S]:
    """Return `page` with each row as `shape` makes it."""
    return PageShape(data=[shape(row) for row in page.data], has_more=page.has_more, next_cursor=page.next_cursor)


def limits_shape(limits: Limits) -> LimitsShape:
    """Return `limits` as JSON."""
    return LimitsShape(**{name: getattr(limits, name) for name in LimitsShape.__struct_fields__})


def model_limits_shape(limits: ModelLimits) -> dict[str, LimitsShape]:
    """Return limits of single models as JSON."""
    return {model: limits_shape(each) for model, each in sorted(limits.items())}


def tenant_shape(tenant: Tenant) -> TenantShape:
    """Return `tenant` as JSON."""
    return TenantShape(
        id=tenant.id,
        name=tenant.name,
        tier=tenant.tier,
        weight=tenant.weight,
        limits=limits_shape(tenant.limits),
        model_limits=model_limits_shape(tenant.model_limits),
        limit_mode=tenant.limit_mode,
        cut_at_budget=tenant.cut_at_budget,
        currency=tenant.currency,
        billing=None if tenant.billing is None else dict(tenant.billing),
        alert_percents=None if tenant.alert_percents is None else list(tenant.alert_percents),
        allowed_models=_list(tenant.allowed_models),
        suspended=tenant.suspended,
        archived=tenant.archived,
        created_at=rfc3339(tenant.created_at),
    )


def key_shape(key: ApiKey) -> KeyShape:
    """Return `key` as JSON."""
    return KeyShape(**_key_fields(key))


def new_key_shape(key: ApiKey, secret: str) -> NewKeyShape:
    """Return `key` as JSON with its secret."""
    return NewKeyShape(**_key_fields(key), key=secret)


def ledger_event_shape(event: UsageEvent) -> LedgerEventShape:
    """Return `event` as JSON; the order of its id is the order of the ledger."""
    return LedgerEventShape(
        id=str(event.id),
        **_same(event, LedgerEventShape, without=("id", "billing_day", "corrects_id", "admitted_at", "settled_at")),
        billing_day=event.billing_day.isoformat(),
        corrects_id=None if event.corrects_id is None else str(event.corrects_id),
        admitted_at=rfc3339(event.admitted_at),
        settled_at=_time(event.settled_at),
    )


def usage_row_shape(row: UsageRow) -> UsageRowShape:
    """Return sums as JSON."""
    same = _same(row, UsageRowShape, without=("start", "end"))
    given = {name: value for name, value in same.items() if value is not None}
    return UsageRowShape(start=rfc3339(row.start), end=rfc3339(row.end), **given)


def price_shape(price: Price) -> PriceShape:
    """Return `price` as JSON."""
    return PriceShape(**_same(price, PriceShape, without=("effective_from",)), effective_from=rfc3339(price.effective_from))


def live_request_shape(live: LiveRequest) -> RequestShape:
    """Return a live request as JSON."""
    return RequestShape(
        **_same(live, RequestShape, without=_REQUEST_TIMES),
        admitted_at=rfc3339(live.admitted_at),
        first_token_at=_time(live.first_token_at),
        finished_at=_time(live.finished_at),
    )


def past_request_shape(row: RequestRow) -> RequestShape:
    """Return a past request as JSON. A row without an end that is not live any more belongs to a process that died."""
    return RequestShape(
        **_same(row, RequestShape, without=(*_REQUEST_TIMES, "state", "queue_position", "explanation")),
        state="finished",
        queue_position=None,
        admitted_at=rfc3339(row.admitted_at),
        first_token_at=_time(row.first_token_at),
        finished_at=_time(row.finished_at),
        explanation=explain_past(row),
    )


_REQUEST_TIMES = ("admitted_at", "first_token_at", "finished_at")


def _key_fields(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "tenant_id": key.tenant_id,
        "name": key.name,
        "prefix": key.prefix,
        "scopes": list(key.scopes),
        "limits": limits_shape(key.limits),
        "model_limits": model_limits_shape(key.model_limits),
        "limit_mode": key.limit_mode,
        "expires_at": _time(key.expires_at),
        "allowed_models": _list(key.allowed_models),
        "allowed_networks": _list(key.allowed_networks),
        "revoked_at": _time(key.revoked_at),
        "replaced_by": key.replaced_by,
        "last_used_at": _time(key.last_used_at),
        "created_at": rfc3339(key.created_at),
    }


def _same(source: object, shape: type[msgspec.Struct], *, without: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of `shape` that `source` has under the same name and in the same form."""
    return {name: getattr(source, name) for name in shape.__struct_fields__ if name not in without}


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else rfc3339(moment)


def _list(values: tuple[str, ...] | None) -> list[str] | None:
    return None if values is None else list(values)
