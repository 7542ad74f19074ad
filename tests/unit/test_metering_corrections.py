"""Corrections are new signed events: they add up with the corrected one, never to less than zero."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest

from appliance.base.db import Database
from appliance.base.errors import BudgetExceeded, IdempotencyConflict, InvalidValue, NotFound
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants import whole_ledger
from appliance.metering.ledger.corrections import KEY_CHARS_MAX, NOTE_CHARS_MAX, Correction, _recorded_sums_query
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.ledger.rows import COST_PICOS_MAX
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.sums import PeriodSums
from appliance.metering.limits.windows import Moment
from appliance.metering.prices import Price
from appliance.metering.usage import UsageReports, _corrections_of
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.principals import Limits, Principal
from tests.support import factories
from tests.support.case_ids import case_id
from tests.support.cast import OWNER, Cast
from tests.support.clock import START, FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import admission_request
from tests.support.ledgers import all_events, euro_prices, running_ledger, settle, utc_admission, utc_corrections, utc_sums
from tests.support.query_plans import query_plan


@pytest.fixture
async def event(database: Database, clock: FakeClock, cast: Cast) -> UsageEvent:
    """A posted event of Bob's at half the price: 10 prompt tokens, 4 of them cached, 5 of output."""
    price = await euro_prices(database, clock).add(
        model="demo", currency="EUR", prompt=1000, cached_prompt=100, completion=2000
    )
    entry = factories.pending(cast.bob, price=price, price_basis_points=5000)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        posted = await settle(ledger, factories.posted(entry.request_id, prompt=10, cached=4, completion=5))
    clock.advance(86400)
    return posted


async def correct(database: Database, clock: FakeClock, event_id: int, **fields: Any) -> UsageEvent:
    return await utc_corrections(database, clock).add(event_id, Correction(**({"note": "a retry of ours"} | fields)))


async def test_a_correction_is_a_new_event_at_the_rate_and_on_the_day_of_the_one_it_corrects(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    correction = await correct(database, clock, event.id, prompt_tokens=-10, cached_tokens=-4, completion_tokens=-5)
    assert correction.cost_picos == -event.cost_picos == -(6 * 500 + 4 * 50 + 5 * 1000)
    assert (correction.kind, correction.status, correction.corrects_id) == ("adjustment", "posted", event.id)
    assert (correction.cause, correction.reserved_tokens, correction.estimated) == ("correction", 0, False)
    assert (correction.billing_day, correction.admitted_at) == (event.billing_day, event.admitted_at)
    assert (correction.posting, correction.settled_at) == (2, clock.now())
    assert await all_events(database) == [event, correction]


async def test_a_correction_of_an_unpriced_event_costs_nothing(database: Database, clock: FakeClock, cast: Cast) -> None:
    entry = factories.pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        posted = await settle(ledger, factories.posted(entry.request_id, prompt=10, cached=4, completion=5))
    correction = await correct(database, clock, posted.id, completion_tokens=-2)
    assert (posted.cost_picos, correction.cost_picos, correction.completion_tokens) == (0, 0, -2)


async def test_the_audit_entry_of_a_correction_has_its_event_reason_and_cost(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    correction = await correct(database, clock, event.id, completion_tokens=-2)
    (entry,) = (await AuditLog(database, clock).page(1, access=OWNER)).data
    assert (entry.action, entry.target_id, entry.tenant_id) == ("ledger.correct", str(correction.id), event.tenant_id)
    assert json.loads(entry.after or "") == {
        "corrects_id": event.id, "note": "a retry of ours", "cost_picos": -2000,
        "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": -2, "rejected_tokens": 0,
    }  # fmt: skip


async def test_reports_include_corrections(database: Database, clock: FakeClock, event: UsageEvent) -> None:
    await correct(database, clock, event.id, completion_tokens=-2)
    (row,) = await UsageReports(database, calendar=BillingCalendar()).usage(
        START - timedelta(days=1), START + timedelta(days=1), access=OWNER
    )
    assert (row.requests, row.completion_tokens, row.cost_picos) == (1, 3, event.cost_picos - 2 * 1000)


async def test_a_cost_alone_can_be_refunded_up_to_what_was_billed(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    credit = await correct(database, clock, event.id, cost_picos=-event.cost_picos + 1)
    assert (credit.cost_picos, credit.price_id, credit.prompt_tokens) == (-event.cost_picos + 1, None, 0)
    with pytest.raises(InvalidValue, match="recorded 1, result") as refused:
        await correct(database, clock, event.id, cost_picos=-2)
    assert refused.value.param == "cost_picos"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"completion_tokens": -6}, "completion_tokens"),
        ({"prompt_tokens": -7}, "cached_tokens"),
        ({"cached_tokens": 7}, "cached_tokens"),
        ({"prompt_tokens": 10**12 + 1}, "prompt_tokens"),
        ({"prompt_tokens": 1.5}, "prompt_tokens"),
        ({"rejected_tokens": -1}, "rejected_tokens"),
        ({"completion_tokens": -1, "cost_picos": -5}, "cost_picos"),
        ({"cost_picos": 0}, "cost_picos"),
        ({"cost_picos": 1.5}, "cost_picos"),
        ({"cost_picos": -(2**63)}, "cost_picos"),
        ({}, "prompt_tokens"),
        ({"completion_tokens": 15_001}, "confirm"),
        ({"prompt_tokens": 10_000_001}, "confirm"),
        ({"cost_picos": 8_200_001}, "confirm"),
        ({"cost_picos": 2**63 - 1, "confirm": True}, "cost_picos"),
        ({"completion_tokens": -1, "note": " "}, "note"),
        ({"completion_tokens": -1, "note": "x" * (NOTE_CHARS_MAX + 1)}, "note"),
        ({"completion_tokens": -1, "note": "a\x00b"}, "note"),
        ({"completion_tokens": -1, "note": "a" * 300 + "\x00"}, "note"),
    ],
    ids=case_id,
)
async def test_an_invalid_correction_is_refused_naming_the_field_and_changes_nothing(
    database: Database, clock: FakeClock, event: UsageEvent, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidValue) as refused:
        await correct(database, clock, event.id, **fields)
    assert refused.value.param == param
    assert await all_events(database) == [event]


async def test_only_settled_usage_can_be_corrected(database: Database, clock: FakeClock, cast: Cast, event: UsageEvent) -> None:
    adjustment = await correct(database, clock, event.id, completion_tokens=1)
    entry, refused = factories.pending(cast.bob), factories.pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        await ledger.open(refused)
        await ledger.settle(factories.voided(refused.request_id))
        pending, void = (await all_events(database))[-2:]
        for event_id in (adjustment.id, pending.id, void.id):
            with pytest.raises(InvalidValue) as not_this:
                await correct(database, clock, event_id, completion_tokens=1)
            assert not_this.value.param == "event_id"
        with pytest.raises(NotFound):
            await correct(database, clock, 10**9, completion_tokens=1)
        await ledger.settle(factories.posted(entry.request_id))
    postings = sorted(each.posting or 0 for each in await all_events(database))
    assert postings == [1, 2, 3, 4]


async def test_concurrent_corrections_never_take_back_more_than_was_recorded(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    tries = await asyncio.gather(
        *(correct(database, clock, event.id, completion_tokens=-2) for _ in range(6)), return_exceptions=True
    )
    assert sum(isinstance(result, UsageEvent) for result in tries) == 2
    assert sum(each.completion_tokens for each in await all_events(database)) == 1


async def test_on_settled_gets_a_correction_in_its_transaction(database: Database, clock: FakeClock, event: UsageEvent) -> None:
    settled: list[UsageEvent] = []

    def hear(_connection: object, events: Any) -> None:
        settled.extend(events)

    corrections = utc_corrections(database, clock, calendar=BillingCalendar("Asia/Tokyo"), on_settled=hear)
    made = await corrections.add(event.id, Correction(note="too much", completion_tokens=-1))
    assert settled == [made]


async def test_an_addition_of_a_thousand_times_the_event_needs_confirmation(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    await correct(database, clock, event.id, completion_tokens=15_000)
    await correct(database, clock, event.id, cost_picos=8_200_000)
    made = await correct(database, clock, event.id, completion_tokens=15_001, confirm=True)
    assert made.completion_tokens == 15_001


async def test_the_largest_correction_can_be_reversed_and_the_ledger_still_reconciles(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    most = COST_PICOS_MAX - event.cost_picos
    await correct(database, clock, event.id, cost_picos=most, confirm=True)
    with pytest.raises(InvalidValue, match="would make cost_picos exceed") as refused:
        await correct(database, clock, event.id, cost_picos=1)
    assert refused.value.param == "cost_picos"
    async with database.reading() as connection:
        findings = await whole_ledger.check(connection, database.kind, BillingCalendar())
    assert {finding.name: finding.state for finding in findings}["corrections"] == "holds"
    await correct(database, clock, event.id, cost_picos=-most)
    assert sum(each.cost_picos for each in await all_events(database)) == event.cost_picos


def one_token_request(cast: Cast, cost: Price, *, budget: int) -> AdmissionRequest:
    """Return a request of Bob's for one token, whose tenant may spend `budget` micro-units this month."""
    tenant = dataclasses.replace(cast.bob.tenant, limits=Limits(monthly_budget=budget, tokens_per_day=100))
    bob = Principal(tenant=tenant, key=cast.bob.key)
    return admission_request(bob, 1, price=cost)


async def test_tokens_returned_by_a_correction_are_usable_at_once_and_counted_once_after_a_restart(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    cost = await euro_prices(database, clock).add(model="demo", currency="EUR", prompt=10**6, cached_prompt=0, completion=10**6)
    admission = utc_admission(clock, utc_sums(database))
    corrections = utc_corrections(database, clock, on_committed=admission.correct)
    entry, request = factories.pending(cast.bob, price=cost), one_token_request(cast, cost, budget=15)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        event = await settle(ledger, factories.posted(entry.request_id, prompt=10, completion=5))
    with pytest.raises(BudgetExceeded):
        await admission.admit(request)

    await corrections.add(event.id, Correction(note="slow", completion_tokens=-2))

    dry_run = await admission.dry_run(request)
    left = {decision.kind: decision.level for decision in dry_run.decisions if decision.scope == "tenant"}
    assert left == {"budget": 2 * 10**6, "tokens_per_day": 100 - 13}
    again = await utc_admission(clock, utc_sums(database)).dry_run(request)
    assert again.decisions == dry_run.decisions


@pytest.mark.parametrize("seen", [False, True])
async def test_a_correction_while_the_sums_are_read_is_counted_once(clock: FakeClock, cast: Cast, seen: bool) -> None:
    adjustment = factories.adjustment(cast.bob, cost_picos=-3 * 10**6)

    class SumsDuringCorrection:
        """Sums of a snapshot taken before the correction, or after; admission gets the correction before the sums."""

        async def read(
            self, currencies: Mapping[Owner, str], at: Moment, ended: Callable[[], Collection[str]]
        ) -> dict[Owner, PeriodSums]:
            admission.correct(adjustment)
            picos, through = (12, 2) if seen else (15, 1)
            sums = PeriodSums(tokens_today=0, cost_month_picos=picos * 10**6, through_posting=through)
            return dict.fromkeys(currencies, sums)

        async def outputs(self, key_id: str, model: str, before: datetime) -> list[int]:
            return []

    admission = utc_admission(clock, SumsDuringCorrection())
    dry_run = await admission.dry_run(one_token_request(cast, factories.price(), budget=15))
    assert [each.level for each in dry_run.decisions if each.kind == "budget"] == [3 * 10**6]


async def test_a_correction_of_usage_of_long_ago_changes_no_limit(clock: FakeClock, cast: Cast) -> None:
    admission, request = utc_admission(clock, EmptySums()), one_token_request(cast, factories.price(), budget=15)
    before = (await admission.dry_run(request)).decisions
    admission.correct(
        factories.adjustment(cast.bob, cost_picos=-3 * 10**6, billing_day=clock.now().date() - timedelta(days=400))
    )
    assert (await admission.dry_run(request)).decisions == before


async def test_a_correction_changes_only_a_budget_in_its_currency(clock: FakeClock, cast: Cast) -> None:
    admission, in_euros = utc_admission(clock, EmptySums()), one_token_request(cast, factories.price(), budget=15)
    bob = in_euros.principal
    with_dollars = dataclasses.replace(bob, tenant=dataclasses.replace(bob.tenant, currency="USD"))
    in_dollars = msgspec.structs.replace(in_euros, principal=with_dollars)
    await admission.dry_run(in_euros)
    for currency, change in (("EUR", -3), ("USD", -4)):
        admission.correct(factories.adjustment(cast.bob, cost_picos=change * 10**6, currency=currency))
    for request, left in ((in_euros, 15 + 3), (in_dollars, 15 + 4)):
        decisions = (await admission.dry_run(request)).decisions
        assert [each.level for each in decisions if each.kind == "budget"] == [left * 10**6]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_sums_of_an_event_and_its_corrections_are_found_by_indexes(database: Database) -> None:
    assert await query_plan(database, _recorded_sums_query(["cost_picos"], 5, "a request")) == [
        "SEARCH usage_events USING INTEGER PRIMARY KEY (rowid=?)",
        "SEARCH usage_events USING INDEX ix_usage_events_adjustments (request_id=?)",
    ]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_corrections_of_an_event_are_found_by_its_request(database: Database, cast: Cast) -> None:
    query = _corrections_of(factories.adjustment(cast.bob, cost_picos=1))
    assert await query_plan(database, query) == ["SEARCH usage_events USING INDEX ix_usage_events_adjustments (request_id=?)"]


async def test_a_correction_repeated_with_its_key_is_made_once(database: Database, clock: FakeClock, event: UsageEvent) -> None:
    corrections = utc_corrections(database, clock)
    whole = Correction(note="a retry of ours\n", prompt_tokens=-10, cached_tokens=-4, completion_tokens=-5)
    made = await corrections.add(event.id, whole, idempotency_key="K")
    clock.advance(60)

    assert await corrections.add(event.id, whole, idempotency_key="K") == made
    added = await corrections.add(event.id, Correction(note="too much", completion_tokens=1), idempotency_key="L")
    assert (made.posting, added.posting) == (2, 3)
    assert await all_events(database) == [event, made, added]


async def test_a_key_is_unique_for_the_corrected_event(
    database: Database, clock: FakeClock, cast: Cast, event: UsageEvent
) -> None:
    entry = factories.pending(cast.charlie)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        other = await settle(ledger, factories.posted(entry.request_id, prompt=10, completion=5))
    less, corrections = Correction(note="the same for all", completion_tokens=-1), utc_corrections(database, clock)
    made = [await corrections.add(each.id, less, idempotency_key="K") for each in (event, other)]
    assert [each.corrects_id for each in made] == [event.id, other.id]


@pytest.mark.parametrize(
    "other",
    [
        {"note": "another reason", "completion_tokens": -1},
        {"note": "why", "completion_tokens": -2},
        {"note": "why", "completion_tokens": -1, "prompt_tokens": 1},
        {"note": "why", "cost_picos": -1000},
    ],
    ids=case_id,
)
async def test_the_key_of_another_correction_is_refused(
    other: dict[str, Any], database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    corrections = utc_corrections(database, clock)
    made = await corrections.add(event.id, Correction(note="why", completion_tokens=-1), idempotency_key="K")
    assert made.cost_picos == -1000
    with pytest.raises(IdempotencyConflict, match=f"event {made.id}, which is another correction of event {event.id}"):
        await corrections.add(event.id, Correction(**other), idempotency_key="K")
    assert await all_events(database) == [event, made]


async def test_another_cost_with_the_same_key_is_refused(database: Database, clock: FakeClock, event: UsageEvent) -> None:
    corrections = utc_corrections(database, clock)
    credit = Correction(note="why", cost_picos=-1000)
    made = await corrections.add(event.id, credit, idempotency_key="K")
    assert await corrections.add(event.id, credit, idempotency_key="K") == made
    with pytest.raises(IdempotencyConflict):
        await corrections.add(event.id, Correction(note="why", cost_picos=-1001), idempotency_key="K")


async def test_concurrent_corrections_with_the_same_key_are_one(
    database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    corrections, less = utc_corrections(database, clock), Correction(note="why", completion_tokens=-1)
    made = await asyncio.gather(*(corrections.add(event.id, less, idempotency_key="K") for _ in range(4)))
    assert [each.id for each in await all_events(database)] == [event.id, *{each.id for each in made}]


@pytest.mark.parametrize("key", ["", "k" * (KEY_CHARS_MAX + 1), "two\nlines", "ключ"])
async def test_a_key_that_is_not_short_printable_ascii_is_refused(
    key: str, database: Database, clock: FakeClock, event: UsageEvent
) -> None:
    with pytest.raises(InvalidValue, match="1 to 255 printable ASCII characters"):
        await utc_corrections(database, clock).add(event.id, Correction(note="x", completion_tokens=-1), idempotency_key=key)
