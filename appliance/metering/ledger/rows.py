"""SQL statements of the ledger and their rows: new events, checkpoints, settlements. Decides nothing about time or retries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any

import msgspec
from sqlalchemy import BindParameter, ColumnElement, Connection, RowMapping, Select, bindparam, literal_column, select, update
from sqlalchemy import insert as insert_into

from appliance.base.prepared import Lookup, Prepared
from appliance.base.tables import prices, requests, usage_events
from appliance.metering.ledger.records import (
    ERROR_CHARS_MAX,
    KINDS,
    TOKEN_COLUMNS,
    PendingEvent,
    Settlement,
    Usage,
    UsageEvent,
)
from appliance.metering.prices import Price, Rate

MICROS_PER_S = 1_000_000
COST_PICOS_MAX = 2**63 - 1
_EVENT_FIELDS = UsageEvent.__struct_fields__
_PRICE_FIELDS = tuple(field.name for field in dataclasses.fields(Price))
DURATIONS = ("admission_wait", "queue", "ttft", "inter_token_p50", "decode")

INSERT_EVENTS = Prepared(insert_into(usage_events))
INSERT_REQUESTS = Prepared(insert_into(requests))

_SETTLED = ("status", "finish_reason", "cause", *TOKEN_COLUMNS, "estimated", "cost_picos", "posting", "settled_at")
_FINISHED = (
    "cached_tokens", "completion_tokens", "kv_blocks", "preemptions", "tenant_open", "awaited_limit", "batch_size_mean",
    "finish_reason", "error", "admission_wait_us", "queue_us", "ttft_us", "inter_token_p50_us", "decode_us", "first_token_at",
    "finished_at",
)  # fmt: skip


def _new(names: Sequence[str]) -> dict[str, BindParameter[Any]]:
    return {name: bindparam(f"new_{name}") for name in names}


def is_kind(kind: str) -> ColumnElement[bool]:
    """Return the condition that an event is of one of KINDS. Each has a partial index on request ids, which both databases use
    only if the kind is a literal in the query."""
    assert kind in KINDS, "it becomes part of the query"
    return usage_events.c.kind == literal_column(f"'{kind}'")


def is_correction_of(event_id: int, request_id: str) -> ColumnElement[bool]:
    """Return the condition for the corrections of an event. They share its request id, by which an index finds them."""
    events = usage_events.c
    return is_kind("adjustment") & (events.request_id == request_id) & (events.corrects_id == event_id)


_IS_USAGE = is_kind("usage")
_OF_PENDING = update(usage_events).where(
    usage_events.c.request_id == bindparam("of_request"), _IS_USAGE, usage_events.c.status == "pending"
)
SETTLE_EVENTS = Prepared(_OF_PENDING.values(_new(_SETTLED)))
WRITE_CHECKPOINTS = Prepared(_OF_PENDING.values(_new(TOKEN_COLUMNS)))
SETTLE_REQUESTS = Prepared(update(requests).where(requests.c.id == bindparam("of_request")).values(_new(_FINISHED)))


def event_row(event: PendingEvent, epoch_id: str, default_currency: str, billing_day: date) -> dict[str, Any]:
    """Return the row of a pending event in `usage_events`, with zero tokens and cost."""
    return {
        "request_id": event.request_id,
        "tenant_id": event.tenant_id,
        "key_id": event.key_id,
        "epoch_id": epoch_id,
        "model": event.model,
        "endpoint": event.endpoint,
        "kind": "usage",
        "status": "pending",
        "reserved_tokens": event.reserved_tokens,
        **dict.fromkeys(TOKEN_COLUMNS, 0),
        "estimated": False,
        "batch": event.batch,
        "price_id": event.price.id if event.price else None,
        "price_basis_points": event.price_basis_points,
        "cost_picos": 0,
        "currency": event.price.currency if event.price else event.currency or default_currency,
        "billing_day": billing_day,
        "admitted_at": event.admitted_at,
    }


def request_row(event: PendingEvent) -> dict[str, Any]:
    """Return the row of `requests` for a pending event."""
    return {
        "id": event.request_id,
        "tenant_id": event.tenant_id,
        "key_id": event.key_id,
        "model": event.model,
        "endpoint": event.endpoint,
        "stream": event.stream,
        "batch": event.batch,
        "prompt_tokens": event.prompt_tokens,
        "cached_tokens": 0,
        "completion_tokens": 0,
        "kv_blocks": 0,
        "preemptions": 0,
        "admitted_at": event.admitted_at,
    }


def insert(connection: Connection, events: Sequence[PendingEvent], event_rows: Sequence[dict[str, Any]]) -> None:
    """Insert pending events into `usage_events` and `requests`."""
    INSERT_EVENTS.execute(connection, event_rows)
    INSERT_REQUESTS.execute(connection, [request_row(event) for event in events])


def existing(connection: Connection, request_ids: Sequence[str]) -> set[str]:
    """Return which of these requests already have an event."""
    return {request_id for request_id, _event_id, _status in _STATES.rows(connection, request_ids)}


def finished(connection: Connection, request_ids: Sequence[str]) -> set[str]:
    """Return which of these requests have an event that is no longer pending."""
    return {request_id for request_id, _event_id, status in _STATES.rows(connection, request_ids) if status != "pending"}


def price_query() -> Select[Any]:
    """Return the query for events joined with their prices, if any."""
    return select(usage_events, *(prices.c[name].label(f"price_{name}") for name in _PRICE_FIELDS if name != "id")).join_from(
        usage_events, prices, prices.c.id == usage_events.c.price_id, isouter=True
    )


EVENTS_WITH_PRICES: Select[Any] = price_query().where(
    usage_events.c.request_id.in_(bindparam("request_ids", expanding=True)), _IS_USAGE
)
"""The events of given requests. Built once: building the query costs more than running it."""


_STATES = Lookup(
    select(usage_events.c.request_id, usage_events.c.id, usage_events.c.status).where(_IS_USAGE), usage_events.c.request_id
)


@dataclasses.dataclass(frozen=True, slots=True)
class RatedEvent:
    """An event as stored in the ledger, and the unit prices of its tokens."""

    event: UsageEvent
    rate: Rate | None


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A pending event written by this process: all of it but the id."""

    row: dict[str, Any]
    price: Price | None


def find_events(connection: Connection, request_ids: Sequence[str], opened: Mapping[str, Opened]) -> dict[str, RatedEvent]:
    """Return the events of these requests. For those in `opened`, only the id and status are read."""
    found: dict[str, RatedEvent] = {}
    known = [request_id for request_id in request_ids if request_id in opened]
    for request_id, event_id, status in _STATES.rows(connection, known) if known else ():
        if status == "pending":
            found[request_id] = _rated_event(event_id, opened[request_id])
    others = [request_id for request_id in request_ids if request_id not in found]
    if others:
        read = connection.execute(EVENTS_WITH_PRICES, {"request_ids": others}).mappings()
        found |= {row["request_id"]: RatedEvent(event_from_row(row), rate_of(row)) for row in read}
    return found


def _rated_event(event_id: int, opened: Opened) -> RatedEvent:
    row, price = opened.row, opened.price
    columns = {**row, "id": event_id, "finish_reason": None, "settled_at": None}
    del columns["epoch_id"]
    return RatedEvent(UsageEvent(**columns), None if price is None else price.rate_at(row["price_basis_points"]))


def rate_of(row: RowMapping) -> Rate | None:
    """Return the unit prices of an event, from a row of `price_query`."""
    if row["price_id"] is None:
        return None
    price = Price(id=row["price_id"], **{name: row[f"price_{name}"] for name in _PRICE_FIELDS if name != "id"})
    return price.rate_at(row["price_basis_points"])


def event_from_row(row: RowMapping) -> UsageEvent:
    """Return the event of a row with the columns of `usage_events`."""
    return UsageEvent(**{name: row[name] for name in _EVENT_FIELDS})


def cost_of(rate: Rate | None, usage: Usage) -> int:
    """Return the cost of these tokens in pico-units. Raises OverflowError if it does not fit the column."""
    if rate is None:
        return 0
    cost = rate.cost_picos(**msgspec.structs.asdict(usage))
    if cost > COST_PICOS_MAX:
        raise OverflowError(f"a cost of {cost} pico-units does not fit 64 bits")
    return cost


def settled(event: UsageEvent, settlement: Settlement, cost_picos: int, now: datetime) -> UsageEvent:
    """Return `event` after `settlement`, without its posting, which is assigned once all events of a round are known."""
    return msgspec.structs.replace(
        event,
        status=settlement.status,
        finish_reason=settlement.finish_reason,
        cause=settlement.cause,
        **msgspec.structs.asdict(settlement.usage),
        estimated=False,
        cost_picos=cost_picos,
        settled_at=now,
    )


def same_outcome(event: UsageEvent, settlement: Settlement) -> bool:
    """Return whether `event` was settled with the same figures. Two voids are equal whatever their reasons."""
    if event.status == settlement.status == "voided":
        return True
    if (event.status, event.finish_reason) != (settlement.status, settlement.finish_reason):
        return False
    return all(getattr(event, name) == getattr(settlement.usage, name) for name in TOKEN_COLUMNS)


def settle_event_parameters(event: UsageEvent) -> dict[str, Any]:
    """Return the parameters of SETTLE_EVENTS for an event in its final state."""
    return _parameters(event.request_id, event, _SETTLED)


def settle_request_parameters(settlement: Settlement, now: datetime) -> dict[str, Any]:
    """Return the parameters of SETTLE_REQUESTS. `prompt_tokens` stays the full prompt length, whether billed or not."""
    record = settlement.record
    durations = {f"new_{name}_us": _micros(getattr(record, f"{name}_s")) for name in DURATIONS}
    return durations | {
        "of_request": settlement.request_id,
        "new_cached_tokens": settlement.usage.cached_tokens,
        "new_completion_tokens": settlement.usage.completion_tokens,
        "new_kv_blocks": record.kv_blocks,
        "new_preemptions": record.preemptions,
        "new_tenant_open": record.tenant_open,
        "new_awaited_limit": record.awaited_limit,
        "new_batch_size_mean": record.batch_size_mean,
        "new_finish_reason": settlement.finish_reason,
        "new_error": None if record.error is None else _storable(record.error),
        "new_first_token_at": record.first_token_at,
        "new_finished_at": record.finished_at or now,
    }


def checkpoint_parameters(request_id: str, usage: Usage) -> dict[str, Any]:
    """Return the parameters of WRITE_CHECKPOINTS."""
    return _parameters(request_id, usage, TOKEN_COLUMNS)


def _parameters(request_id: str, source: UsageEvent | Usage, names: Sequence[str]) -> dict[str, Any]:
    return {"of_request": request_id, **{f"new_{name}": getattr(source, name) for name in names}}


def _storable(text: str) -> str:
    """Return `text` without NULs and lone surrogates, which a database may reject, cut to ERROR_CHARS_MAX."""
    clean = text.replace("\x00", "").encode(errors="replace").decode()
    return clean[:ERROR_CHARS_MAX]


def _micros(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * MICROS_PER_S)
