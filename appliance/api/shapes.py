"""The JSON of the administrator API: one struct per noun, each built from a type of another layer.

Times are RFC 3339 in UTC, costs are integers in pico-units, lists are pages. `Shape.of` fills a struct by field name; its
keyword arguments are the fields whose name or value differs from that of the source.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime
from typing import Any, Generic, Self, TypeVar

import msgspec

from appliance.base.clock import rfc3339
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.past_requests import PastRequest
from appliance.metering.usage import UsageRow
from appliance.serving.explanation import explain_live, explain_past
from appliance.serving.live_requests import LiveRequest
from appliance.tenancy.pages import Page
from appliance.tenancy.principals import ApiKey, Limits, ModelLimits, Tenant

S = TypeVar("S")
T = TypeVar("T")


class Shape(msgspec.Struct):
    """The JSON of one object: a value of another layer as clients see it."""

    @classmethod
    def of(cls, source: object, **overrides: object) -> Self:
        """Return the JSON of `source`: each field is in `overrides`, or is the source's attribute of the same name."""
        fields = cls.__struct_fields__
        return cls(**{name: _to_json(overrides[name] if name in overrides else getattr(source, name)) for name in fields})


class PageShape(msgspec.Struct, Generic[S], kw_only=True):
    """A page of a list."""

    data: list[S]
    has_more: bool
    next_cursor: str | None


class LimitsShape(Shape, kw_only=True):
    """Limits of a tenant, a key or a model. Null means no limit; the limits of the other levels still apply."""

    tokens_per_minute: int | None
    requests_per_minute: int | None
    concurrent_requests: int | None
    tokens_per_day: int | None
    monthly_budget: int | None


class TenantShape(Shape, kw_only=True):
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


class KeyShape(Shape, kw_only=True):
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
    """An API key with its secret, which is returned only in this response."""

    key: str


class LedgerEventShape(Shape, kw_only=True):
    """A usage event of the ledger: a request, or an adjustment, which corrects one with signed counts and cost."""

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


class RequestShape(Shape, kw_only=True):
    """A live or past request with its timeline."""

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
    admitted_at: str | None
    first_token_at: str | None
    finished_at: str | None
    admission_wait_s: float | None
    awaited_limit: str | None
    queue_s: float | None
    ttft_s: float | None
    tokens_per_second: float | None
    inter_token_p50_s: float | None
    batch_size_mean: float | None
    finish_reason: str | None
    error: str | None
    explanation: str


class PriceShape(Shape, kw_only=True):
    """A price of a model, in micro-units of the currency per million tokens."""

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


class UsageRowShape(Shape, kw_only=True, omit_defaults=True):
    """Usage and cost of one group in one period."""

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


def _to_json(value: Any) -> Any:
    convert = _CONVERTERS.get(type(value))
    return value if convert is None else convert(value)


_CONVERTERS: dict[type, Callable[[Any], object]] = {
    datetime: rfc3339,
    date: date.isoformat,
    tuple: list,
    Limits: LimitsShape.of,
}
"""For types that JSON does not have."""


def page_shape(page: Page[T], shape: Callable[[T], S]) -> PageShape[S]:
    """Return the JSON of `page`, each row converted by `shape`."""
    return PageShape(data=[shape(row) for row in page.data], has_more=page.has_more, next_cursor=page.next_cursor)


def _model_limits(limits_by_model: ModelLimits) -> dict[str, LimitsShape]:
    return {model: LimitsShape.of(limits) for model, limits in sorted(limits_by_model.items())}


def tenant_shape(tenant: Tenant) -> TenantShape:
    """Return `tenant` as JSON."""
    billing = None if tenant.billing is None else dict(tenant.billing)
    return TenantShape.of(tenant, model_limits=_model_limits(tenant.model_limits), billing=billing)


def key_shape(key: ApiKey) -> KeyShape:
    """Return `key` as JSON."""
    return KeyShape.of(key, model_limits=_model_limits(key.model_limits))


def new_key_shape(key: ApiKey, secret: str) -> NewKeyShape:
    """Return `key` as JSON with its secret."""
    return NewKeyShape.of(key, model_limits=_model_limits(key.model_limits), key=secret)


def ledger_event_shape(event: UsageEvent) -> LedgerEventShape:
    """Return `event` as JSON. Ids increase in the order of the ledger."""
    corrects_id = None if event.corrects_id is None else str(event.corrects_id)
    return LedgerEventShape.of(event, id=str(event.id), corrects_id=corrects_id)


def usage_row_shape(row: UsageRow) -> UsageRowShape:
    """Return `row` as JSON, without the group fields that are None."""
    group = {name: getattr(row, name) for name in ("tenant_id", "key_id", "model")}
    return UsageRowShape.of(row, **{name: msgspec.UNSET if value is None else value for name, value in group.items()})


def live_request_shape(live: LiveRequest) -> RequestShape:
    """Return a request that is live or has just ended as JSON."""
    return RequestShape.of(live, explanation=explain_live(live))


def past_request_shape(row: PastRequest) -> RequestShape:
    """Return a past request as JSON. Its state is `finished` even if its row has no end, as after a crash of the process."""
    return RequestShape.of(row, state="finished", queue_position=None, explanation=explain_past(row))
