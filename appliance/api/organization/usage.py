"""OpenAI's organization API, usage and costs: the same sums as `/admin/v1/usage`, in buckets that may be empty.

Days are those of the billing time zone. OpenAI also groups by user, batch and service tier. Our sums are not kept by these, so
they are refused by name: events record batch work, but a report from events would have to read all of them. Knows nothing of
how the sums are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

import msgspec
from litestar import get

from appliance.api.auth import authenticate_reader
from appliance.api.connection_services import services_of
from appliance.api.organization.queries import page_limit, seconds, unix
from appliance.api.queries import AdminRequest, both_spellings, choice, values
from appliance.base.errors import InvalidValue, UnsupportedParameter
from appliance.base.money import PICOS_PER_UNIT
from appliance.metering.calendar import BillingCalendar
from appliance.metering.usage import UsageFilter, UsageRow
from appliance.metering.usage_segments import bucket_end, bucket_start
from appliance.tenancy.access import Access
from appliance.tenancy.pages import decode_cursor, encode_cursor

BUCKET_OF_WIDTH = {"1m": "minute", "1h": "hour", "1d": "day"}
LIMITS_OF_WIDTH = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}  # buckets per page: default, maximum
COST_LIMITS = (7, 180)
COST_WIDTHS = ("1d",)
USAGE_GROUPS = ("project_id", "api_key_id", "model")
COST_GROUPS = ("project_id", "api_key_id", "line_item")
RESULTS_MAX = 3000  # on a page of several buckets
GROUP_OF = {"project_id": "tenant", "api_key_id": "key", "model": "model", "line_item": "model"}
FILTERS = ("project_ids", "api_key_ids")
PERIOD = ("start_time", "end_time", "bucket_width", "limit", "page")
UNSUPPORTED_FILTERS = ("user_ids", "batch")
USAGE_LISTS = both_spellings(*FILTERS, "models", "user_ids", "group_by")
REQUIRED = ("start_time",)
SECURITY = ("administrator", "api_key", "api_key_header")  # as `authenticate_reader` accepts
USAGE_OPTIONS = {
    "query": (*PERIOD, *USAGE_LISTS, "batch"), "repeatable": USAGE_LISTS, "required": REQUIRED, "security": SECURITY,
}  # fmt: skip
COSTS_LISTS = both_spellings(*FILTERS, "line_items", "group_by")
COSTS_OPTIONS = {"query": (*PERIOD, *COSTS_LISTS), "repeatable": COSTS_LISTS, "required": REQUIRED, "security": SECURITY}

R = TypeVar("R")


class CompletionsResult(msgspec.Struct, kw_only=True):
    """The tokens of one group in one bucket."""

    input_tokens: int
    input_cached_tokens: int
    input_uncached_tokens: int
    output_tokens: int
    input_text_tokens: int
    input_cached_text_tokens: int
    output_text_tokens: int
    num_model_requests: int
    project_id: str | None
    api_key_id: str | None
    model: str | None
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    user_id: str | None = None
    batch: bool | None = None
    service_tier: str | None = None
    object: str = "organization.usage.completions.result"


class EmbeddingsResult(msgspec.Struct, kw_only=True):
    """The tokens of one group in one bucket."""

    input_tokens: int
    num_model_requests: int
    project_id: str | None
    api_key_id: str | None
    model: str | None
    user_id: str | None = None
    object: str = "organization.usage.embeddings.result"


class AmountShape(msgspec.Struct, kw_only=True):
    """An amount of money."""

    value: float
    currency: str


class CostsResult(msgspec.Struct, kw_only=True):
    """The cost of one group in one bucket and one currency."""

    amount: AmountShape
    line_item: str | None
    project_id: str | None
    api_key_id: str | None
    quantity: float | None
    quantity_unit: str | None
    user_id: str | None = None
    object: str = "organization.costs.result"


class BucketShape(msgspec.Struct, Generic[R], kw_only=True):
    """The results of one period, `start_time <= t < end_time`."""

    start_time: int
    end_time: int
    results: list[R]
    object: str = "bucket"


class UsagePageShape(msgspec.Struct, Generic[R], kw_only=True):
    """A page of buckets, oldest first."""

    data: list[BucketShape[R]]
    has_more: bool
    next_page: str | None
    object: str = "page"


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """The checked query parameters of a request for a page of buckets."""

    start: datetime
    end: datetime
    bucket: str
    buckets_max: int
    groups: tuple[str, ...]
    filters: UsageFilter

    @classmethod
    def of(
        cls, request: AdminRequest, groups: tuple[str, ...], models_name: str, limits: dict[str, tuple[int, int]]
    ) -> UsageQuery:
        """Return the query of `request`. Raises UnsupportedParameter or InvalidValue."""
        for name in UNSUPPORTED_FILTERS:
            if values(request, name) is not None:
                supported = ", ".join((*FILTERS, models_name))
                raise UnsupportedParameter(f"usage cannot be filtered by {name}; filter by {supported}", param=name)
        width = choice(request, "bucket_width", tuple(limits), "1d") or "1d"
        bucket, start = BUCKET_OF_WIDTH[width], seconds(request, "start_time")
        if start is None:
            raise InvalidValue("missing parameter: start_time", param="start_time")
        end = seconds(request, "end_time") or max(start, _end_of_current_bucket(request, bucket))
        if end <= start and "end_time" in request.query_params:
            raise InvalidValue("end_time must be later than start_time", param="end_time")
        return cls(
            start=_page_start(request, start, end),
            end=end,
            bucket=bucket,
            buckets_max=page_limit(request, *limits[width]),
            groups=_groups(request, groups),
            filters=UsageFilter(
                tenant_ids=values(request, "project_ids"),
                key_ids=values(request, "api_key_ids"),
                models=values(request, models_name),
            ),
        )

    def buckets(self, calendar: BillingCalendar, now: datetime) -> Iterator[tuple[datetime, datetime]]:
        """Yield the start and end of each bucket, cut off at the ends of the period. None begins in the future."""
        start = self.start
        while start < self.end and start <= now:
            end = min(bucket_end(bucket_start(start, self.bucket, calendar), self.bucket, calendar), self.end)
            yield start, end
            start = end


@get("/usage/completions", summary="List token usage of chat completions", opt=USAGE_OPTIONS)
async def list_completions_usage(request: AdminRequest) -> UsagePageShape[CompletionsResult]:
    """Return tokens and requests by bucket and group. An API key with the scope `usage` sees only its own tenant."""
    access = await authenticate_reader(request)
    query = UsageQuery.of(request, USAGE_GROUPS, "models", LIMITS_OF_WIDTH)
    return await _page(request, access, query, _completions_results)


@get("/usage/embeddings", summary="List token usage of embeddings", opt=USAGE_OPTIONS)
async def list_embeddings_usage(request: AdminRequest) -> UsagePageShape[EmbeddingsResult]:
    """Return buckets without results: this version does not serve embeddings."""
    access = await authenticate_reader(request)
    query = UsageQuery.of(request, USAGE_GROUPS, "models", LIMITS_OF_WIDTH)
    return await _page(request, access, query, lambda _rows: [])


@get("/costs", summary="List costs", opt=COSTS_OPTIONS)
async def list_organization_costs(request: AdminRequest) -> UsagePageShape[CostsResult]:
    """Return the cost by day and group, with a separate result for each currency.

    An API key with the scope `usage` sees only its own tenant.
    """
    access = await authenticate_reader(request)
    query = UsageQuery.of(request, COST_GROUPS, "line_items", dict.fromkeys(COST_WIDTHS, COST_LIMITS))
    return await _page(request, access, query, _costs_results)


async def _page(
    request: AdminRequest,
    access: Access,
    query: UsageQuery,
    results: Callable[[Iterable[UsageRow]], list[R]],
) -> UsagePageShape[R]:
    """Return the requested buckets; fewer if together they have more than RESULTS_MAX results. No bucket is ever split."""
    services = services_of(request)
    calendar = services.reports.calendar
    read = partial(
        services.reports.usage,
        bucket=query.bucket,
        group_by=[GROUP_OF[name] for name in query.groups],
        filters=query.filters,
        access=access,
    )
    buckets = query.buckets(calendar, services.clock.now())
    shown = list(islice(buckets, query.buckets_max))
    following = next(buckets, None)
    rows = await read(shown[0][0], shown[-1][1], rows_max=RESULTS_MAX + 1) if shown else []
    if len(rows) > RESULTS_MAX:
        # The last row belongs to the first bucket of the next page, unless a single bucket is too large.
        num_fitting = sum(end <= rows[-1].start for _start, end in shown)
        if num_fitting == 0:
            num_fitting, rows = 1, await read(*shown[0])
        shown, following = shown[:num_fitting], [*shown, following][num_fitting]
    by_start: dict[datetime, list[UsageRow]] = {}
    for row in rows:
        by_start.setdefault(row.start, []).append(row)
    data = [
        BucketShape(
            start_time=unix(start),
            end_time=unix(end),
            results=results(by_start.get(bucket_start(start, query.bucket, calendar), ())),
        )
        for start, end in shown
    ]
    next_page = None if following is None else encode_cursor("organization_usage", [unix(following[0])])
    return UsagePageShape(data=data, has_more=following is not None, next_page=next_page)


def _completions_results(rows: Iterable[UsageRow]) -> list[CompletionsResult]:
    """Return tokens by group, summed over currencies."""
    sums: dict[tuple[str | None, ...], list[int]] = {}
    for row in rows:
        counts = (row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.requests)
        totals = sums.setdefault((row.tenant_id, row.key_id, row.model), [0, 0, 0, 0])
        totals[:] = [total + count for total, count in zip(totals, counts, strict=True)]
    return [
        CompletionsResult(
            input_tokens=prompt,
            input_cached_tokens=cached,
            input_uncached_tokens=prompt - cached,
            output_tokens=completion,
            input_text_tokens=prompt - cached,
            input_cached_text_tokens=cached,
            output_text_tokens=completion,
            num_model_requests=requests,
            project_id=tenant_id,
            api_key_id=key_id,
            model=model,
        )
        for (tenant_id, key_id, model), (prompt, cached, completion, requests) in sums.items()
    ]


def _costs_results(rows: Iterable[UsageRow]) -> list[CostsResult]:
    return [
        CostsResult(
            amount=AmountShape(value=row.cost_picos / PICOS_PER_UNIT, currency=row.currency.lower()),
            line_item=row.model,
            project_id=row.tenant_id,
            api_key_id=row.key_id,
            quantity=None if row.model is None else float(row.prompt_tokens + row.completion_tokens),
            quantity_unit=None if row.model is None else "tokens",
        )
        for row in rows
    ]


def _end_of_current_bucket(request: AdminRequest, bucket: str) -> datetime:
    """Return the end of the current bucket: the default end of a report, so that its last bucket is not cut off."""
    services = services_of(request)
    calendar = services.reports.calendar
    return bucket_end(bucket_start(services.clock.now(), bucket, calendar), bucket, calendar)


def _groups(request: AdminRequest, allowed: tuple[str, ...]) -> tuple[str, ...]:
    given = values(request, "group_by") or frozenset()
    for name in sorted(given - set(allowed)):
        raise UnsupportedParameter(f"usage cannot be grouped by {name}; group_by takes {', '.join(allowed)}", param="group_by")
    return tuple(name for name in allowed if name in given)


def _page_start(request: AdminRequest, start: datetime, end: datetime) -> datetime:
    """Return where the page begins: at `start`, or where the previous page ended. Raises InvalidValue."""
    cursor = request.query_params.get("page")
    if cursor is None:
        return start
    with suppress(InvalidValue):
        (at,) = decode_cursor("organization_usage", cursor, [int])
        if unix(start) < at < end.timestamp():
            return datetime.fromtimestamp(at, UTC)
    raise InvalidValue("invalid page for this period", param="page")
