"""Corrections of the ledger: new events with signed amounts that name the event they correct. Settled events never change.

A correction adds or removes tokens at the prices of the event it corrects, or changes only its cost. It belongs to the day of
the request; if the invoice of that month is closed, it goes to the next one. An event and all its corrections never sum to less
than zero. An addition so large that it looks like a typing error is refused until it is confirmed. With an idempotency key, the
same correction is made only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import RowMapping, Select, insert, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base import counters
from appliance.base.clock import Clock
from appliance.base.db import Database, after_commit
from appliance.base.errors import IdempotencyConflict, InvalidValue, NotFound
from appliance.base.money import format_picos
from appliance.base.tables import usage_events
from appliance.base.texts import counted
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.ledger.records import BILLED, TOKEN_COLUMNS, UsageEvent
from appliance.metering.ledger.rollups import join_sum, split_sum
from appliance.metering.ledger.round import OnSettled
from appliance.metering.ledger.rows import COST_PICOS_MAX, event_from_row, is_correction_of, price_query, rate_of
from appliance.tenancy.audit import record
from appliance.tenancy.fields import check_name, check_whole

TOKENS_MAX = 10**12
UNCONFIRMED_TIMES = 1000
UNCONFIRMED_TOKENS = 10_000_000
NOTE_CHARS_MAX = 500
KEY_CHARS_MAX = 255
CAUSE = "correction"
KEY_HEADER = "Idempotency-Key"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What to add to an event: signed tokens, or only a signed cost. `note` is the reason, shown on the tenant's invoice.

    `confirm` is required to add more than UNCONFIRMED_TOKENS, or more than UNCONFIRMED_TIMES the event's tokens or cost.
    """

    note: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    rejected_tokens: int = 0
    cost_picos: int | None = None
    confirm: bool = False

    @property
    def tokens(self) -> dict[str, int]:
        """Return the signed token counts by column."""
        return {name: getattr(self, name) for name in TOKEN_COLUMNS}


class Corrections:
    """Writes corrections, each in its own transaction. `on_committed` is called with the new event once it is durable."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        *,
        calendar: BillingCalendar,
        on_settled: OnSettled,
        on_committed: Callable[[UsageEvent], None],
    ) -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._on_settled = on_settled
        self._on_committed = on_committed

    async def add(self, event_id: int, correction: Correction, *, idempotency_key: str | None = None) -> UsageEvent:
        """Return the new event, or the one that the same correction of this event with the same `idempotency_key` has made.

        Raises NotFound, InvalidValue if the event to correct is pending, voided or an adjustment, or if more would be taken
        back than was recorded, and IdempotencyConflict if another correction of this event had the key."""
        _check(correction)
        _check_key(idempotency_key)
        async with self._db.writing() as connection:
            # This locks out settlements and other corrections, so that reading and changing the sums is atomic.
            await counters.lock(connection, counters.POSTING)
            row = await _find_correctable(connection, event_id)
            made = None if idempotency_key is None else await _find_made(connection, row, idempotency_key)
            if made is not None:
                _check_same(made, correction)
                return made
            _check_confirmed(row, correction)
            cost_picos = _cost(row, correction)
            await _check_remainder(connection, row, correction, cost_picos)
            posting = await counters.take(connection, counters.POSTING)
            columns = _columns(row, correction, cost_picos, posting, self._clock.now())
            event = await _insert(connection, columns | {"idempotency_key": idempotency_key})
            await connection.run_sync(rollups.add, self._calendar, [event])
            await connection.run_sync(self._on_settled, [event])
            after = {"corrects_id": event_id, "note": event.note, "cost_picos": cost_picos, **correction.tokens}
            await record(
                connection, self._clock, "ledger.correct", "event", str(event.id), tenant_id=event.tenant_id, after=after
            )
            after_commit(connection, lambda _db: self._on_committed(event))
        return event


def _check(correction: Correction) -> None:
    check_name(correction.note.replace("\n", " "), "note", NOTE_CHARS_MAX)  # it may have several lines
    for name, count in correction.tokens.items():
        check_whole(count, name, -TOKENS_MAX, TOKENS_MAX)
    if correction.cost_picos is None:
        if not any(correction.tokens.values()):
            raise InvalidValue("a correction must change token counts or the cost", param="prompt_tokens")
        return
    check_whole(correction.cost_picos, "cost_picos", -COST_PICOS_MAX, COST_PICOS_MAX)
    if any(correction.tokens.values()):
        raise InvalidValue("the cost of a token correction is computed: omit cost_picos", param="cost_picos")
    if not correction.cost_picos:
        raise InvalidValue("cost_picos must not be zero", param="cost_picos")


def _check_key(idempotency_key: str | None) -> None:
    if idempotency_key is None or (
        1 <= len(idempotency_key) <= KEY_CHARS_MAX and idempotency_key.isascii() and idempotency_key.isprintable()
    ):
        return
    message = f"the header {KEY_HEADER} must have 1 to {KEY_CHARS_MAX} printable ASCII characters"
    raise InvalidValue(message, param=KEY_HEADER)


async def _find_correctable(connection: AsyncConnection, event_id: int) -> RowMapping:
    found = await connection.execute(price_query().where(usage_events.c.id == event_id))
    row: RowMapping | None = found.mappings().first()
    if row is None:
        raise NotFound("no such event", param="event_id")
    if row["kind"] != "usage":
        raise InvalidValue(f"event {event_id} is an adjustment; correct the event that it corrects", param="event_id")
    if row["status"] not in BILLED:
        raise InvalidValue(f"event {event_id} is {row['status']}: there is nothing to correct", param="event_id")
    return row


async def _find_made(connection: AsyncConnection, row: RowMapping, idempotency_key: str) -> UsageEvent | None:
    """Return the correction of the event `row` that was made with this key, or None."""
    query = select(usage_events).where(is_correction_of(row["id"], row["request_id"]))
    found = await connection.execute(query.where(usage_events.c.idempotency_key == idempotency_key))
    made = found.mappings().first()
    return None if made is None else event_from_row(made)


def _check_same(made: UsageEvent, correction: Correction) -> None:
    """Raise IdempotencyConflict unless `made` is what `correction` asks for. The cost of tokens follows from them."""
    is_same = (
        made.note == correction.note.strip()
        and all(getattr(made, name) == count for name, count in correction.tokens.items())
        and correction.cost_picos in (None, made.cost_picos)
    )
    if not is_same:
        message = f"this {KEY_HEADER} has made event {made.id}, which is another correction of event {made.corrects_id}"
        raise IdempotencyConflict(message, param=KEY_HEADER)


def _check_confirmed(row: RowMapping, correction: Correction) -> None:
    """Raise InvalidValue for an unconfirmed addition that is too large for a request of this size."""
    if correction.confirm:
        return
    added = {name: count for name, count in correction.tokens.items() if count > 0}
    tokens = row["prompt_tokens"] + row["completion_tokens"]
    for name, count in added.items():
        if count > min(UNCONFIRMED_TIMES * max(tokens, 1), UNCONFIRMED_TOKENS):
            size = counted(tokens, "token")
            raise InvalidValue(f"the event counts {size}: adding {count} {name} needs `confirm`", param="confirm")
    if (correction.cost_picos or 0) > UNCONFIRMED_TIMES * row["cost_picos"]:
        added_cost, cost = (format_picos(picos, row["currency"]) for picos in (correction.cost_picos or 0, row["cost_picos"]))
        raise InvalidValue(f"the event cost {cost}: adding {added_cost} needs `confirm`", param="confirm")


def _cost(row: RowMapping, correction: Correction) -> int:
    if correction.cost_picos is not None:
        return correction.cost_picos
    rate = rate_of(row)
    cost = 0 if rate is None else rate.cost_picos(**correction.tokens)
    if abs(cost) > COST_PICOS_MAX:
        raise InvalidValue(f"the correction costs {cost} pico-units, which do not fit 64 bits", param="prompt_tokens")
    return cost


def _recorded_sums_query(names: Sequence[str], event_id: int, request_id: str) -> Select[Any]:
    """Return the query for the sums, in halves, of an event and all its corrections."""
    events = usage_events.c
    halves: list[Any] = [half for name in names for half in split_sum(events[name])]
    return select(*halves).where(or_(events.id == event_id, is_correction_of(event_id, request_id)))


async def _check_remainder(connection: AsyncConnection, row: RowMapping, correction: Correction, cost_picos: int) -> None:
    """Raise InvalidValue, naming the field, if the event and all its corrections would sum to less than zero or to a cost that
    does not fit."""
    names = (*TOKEN_COLUMNS, "cost_picos")
    sums = (await connection.execute(_recorded_sums_query(names, row["id"], row["request_id"]))).one()
    recorded = {name: join_sum(*sums[2 * index : 2 * index + 2]) for index, name in enumerate(names)}
    after = {name: recorded[name] + added for name, added in (correction.tokens | {"cost_picos": cost_picos}).items()}
    for name in names:
        if after[name] < 0:
            message = f"correction would make {name} negative: recorded {recorded[name]}, result {after[name]}"
            raise InvalidValue(message, param=name)
    if after["cost_picos"] > COST_PICOS_MAX:
        message = f"correction would make cost_picos exceed {COST_PICOS_MAX}: recorded {recorded['cost_picos']}"
        raise InvalidValue(message, param="cost_picos")
    if after["cached_tokens"] > after["prompt_tokens"]:
        raise InvalidValue("cached_tokens would exceed prompt_tokens", param="cached_tokens")


def _columns(row: RowMapping, correction: Correction, cost_picos: int, posting: int, now: datetime) -> dict[str, Any]:
    copied: Sequence[str] = (
        "request_id", "tenant_id", "key_id", "epoch_id", "model", "endpoint", "finish_reason", "batch", "price_basis_points",
        "currency", "billing_day", "admitted_at",
    )  # fmt: skip
    return {
        **{name: row[name] for name in copied},
        **correction.tokens,
        "kind": "adjustment",
        "status": "posted",
        "cause": CAUSE,
        "reserved_tokens": 0,
        "estimated": False,
        "price_id": row["price_id"] if correction.cost_picos is None else None,
        "cost_picos": cost_picos,
        "posting": posting,
        "corrects_id": row["id"],
        "note": correction.note.strip(),
        "settled_at": now,
    }


async def _insert(connection: AsyncConnection, columns: dict[str, Any]) -> UsageEvent:
    written = await connection.execute(insert(usage_events).values(**columns).returning(*usage_events.c))
    return event_from_row(written.mappings().one())
