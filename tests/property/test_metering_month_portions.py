"""Random months of several tenants: drafting and closing them together equals drafting and closing them one by one.

Each tenant has a twin with the same history. One of the two is billed alone, the other together with the rest; the portions are
so small that a month needs several.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Sequence
from datetime import date, timedelta
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.base.errors import GatehouseError
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants import invoices as invariants
from appliance.metering.invoicing import invoices as service
from appliance.metering.invoicing.free_allowances import FreeAllowances
from appliance.metering.invoicing.portions import Expected, Outcome
from appliance.metering.invoicing.rows import Invoice
from appliance.metering.prices import Price
from appliance.tenancy.audit import AuditLog
from tests.support.billing import Tokens, add_price, post_event
from tests.support.cast import OWNER, Cast, Person, make_person
from tests.support.clock import FakeClock
from tests.support.ledgers import euro_invoices

MONTHS = ("2026-08", "2026-09", "2026-10")
PAIRS, EVENTS = 5, 40


@pytest.fixture
async def pairs(database: Database, clock: FakeClock, cast: Cast) -> list[tuple[Person, Person]]:
    """Return tenants and their twins."""
    names = [(f"alone {number}", f"together {number}") for number in range(PAIRS)]
    return [(await make_person(database, clock, a), await make_person(database, clock, b)) for a, b in names]


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_tenants_billed_together_get_the_invoices_that_each_would_get_alone(
    database: Database,
    clock: FakeClock,
    cast: Cast,
    pairs: list[tuple[Person, Person]],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    monkeypatch.setattr(service, "PORTION_TENANTS", 2)
    chance, invoices = random.Random(seed), euro_invoices(database, clock, BillingCalendar("UTC"))
    prices = [None, *[await add_price(database, prompt=chance.randrange(1, 10**7)) for _ in range(3)]]
    allowances = FreeAllowances(database, clock)
    for pair in pairs[::2]:
        for person in pair:
            await allowances.set(person.tenant.id, MONTHS[0], 30_000, access=OWNER)
    for index, month in enumerate(MONTHS):
        for _ in range(EVENTS):
            await _post_to_both(database, cast, chance.choice(pairs), MONTHS[: index + 1], prices, chance)
        only = chance.choice([None, "billable", "closable"])
        alone = [await _outcome(invoices.draft(one.tenant.id, month, only=only, access=OWNER)) for one, _ in pairs]
        twins = [twin.tenant.id for _, twin in pairs]
        drafted = await invoices.draft_each(twins, month, only=only, access=OWNER)
        assert [_contents(drafted[tenant_id]) for tenant_id in twins] == [_contents(each) for each in alone]

        ids = [
            (draft.head.id, of_twin.head.id)
            for draft, of_twin in zip(alone, (drafted[tenant_id] for tenant_id in twins), strict=True)
            if isinstance(draft, Invoice) and isinstance(of_twin, Invoice) and chance.random() < 0.9
        ]
        for some in (ids[::2], ids[1::2]):  # neighbours get invoices with different postings
            closed_alone = [await _outcome(invoices.close(invoice_id, access=OWNER)) for invoice_id, _ in some]
            closed = await invoices.close_each({twin_id: Expected() for _, twin_id in some}, access=OWNER)
            assert [_contents(closed[twin_id]) for _, twin_id in some] == [_contents(each) for each in closed_alone]
            stored = [each for each in closed.values() if isinstance(each, Invoice)]
            assert [await invoices.get(each.head.id, access=OWNER) for each in stored] == stored
            for pair in pairs:
                await _post_to_both(database, cast, pair, MONTHS[: index + 1], prices, chance)
    heads = (await invoices.list(state="closed", access=OWNER)).data
    assert sorted(head.number or "" for head in heads) == [f"2026-{count:04d}" for count in range(1, len(heads) + 1)]
    assert len(heads) >= 2 * PAIRS
    async with database.reading() as connection:
        assert (await invariants.check(connection)).state == "holds"
    assert (await AuditLog(database, clock).verify()).fault is None


async def _post_to_both(
    database: Database,
    cast: Cast,
    pair: tuple[Person, Person],
    months: Sequence[str],
    prices: Sequence[Price | None],
    chance: random.Random,
) -> None:
    """Post the same event to a tenant and its twin: in one of `months`, mostly the last; sometimes a correction or in USD."""
    month = chance.choice([*months, months[-1], months[-1]])
    is_correction = chance.random() < 0.2
    prompt, sign = chance.randrange(1, 200), -1 if is_correction else 1
    cached, completion, rejected = chance.randrange(prompt), chance.randrange(100), chance.randrange(20)
    tokens = Tokens(prompt=sign * prompt, cached=sign * cached, completion=sign * completion, rejected=sign * rejected)
    event: dict[str, Any] = {
        "epoch_id": cast.epoch_id,
        "price": chance.choice(prices),
        "model": chance.choice(["a", "b"]),
        "basis_points": chance.choice([10_000, 5_000, 3_333]),
        "batch": chance.random() < 0.2,
        "is_correction": is_correction,
        "note": chance.choice([None, "a refund", "our mistake"]) if is_correction else None,
        "currency": "USD" if chance.random() < 0.005 else "EUR",
    }
    day = date.fromisoformat(f"{month}-01") + timedelta(days=chance.randrange(28))
    for person in pair:
        await post_event(database, person, day, tokens, **event)


async def _outcome(call: Awaitable[Invoice]) -> Outcome:
    try:
        return await call
    except GatehouseError as error:
        return error


def _contents(outcome: Outcome) -> object:
    """Return what twins have in common: all but ids, numbers, names and times."""
    if isinstance(outcome, GatehouseError):
        return type(outcome), outcome.message
    head = outcome.head
    return outcome.lines, outcome.totals, outcome.currency, head.state, head.total_micros, head.tax_micros, head.month
