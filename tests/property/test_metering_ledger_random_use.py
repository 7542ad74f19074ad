"""The ledger under random use, failing databases and deaths: each admitted request once, none pending, costs that add up.

With a journal, as on SQLite, and without, as on PostgreSQL; either works with either database.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from appliance.base.db import Database
from appliance.base.errors import Overloaded
from appliance.base.journal import Journal
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.ledger.journal_records import replay
from appliance.metering.ledger.records import Usage
from appliance.metering.ledger.writer import Ledger
from appliance.metering.prices import Price
from tests.support.cast import Cast
from tests.support.clock import FakeClock
from tests.support.factories import pending, posted, voided
from tests.support.ledgers import FailingDatabase, all_events, euro_prices, kill_ledger, utc_ledger, utc_recover, without_alerts

REQUESTS_PER_EPOCH = 25
LAST = 6
"""Requests after the others have ended: too few to be written to the tables at once, so a kill leaves them in the journal."""
EPOCHS = 3


class Owner:
    """Plays the tasks that own generations, and records the status and cost that they were promised."""

    def __init__(self, ledger: Ledger, cast: Cast, clock: FakeClock, price: Price, chance: random.Random) -> None:
        self.refused: set[str] = set()
        self.settled: dict[str, tuple[str, int]] = {}
        self.admitted: set[str] = set()
        self._ledger, self._cast, self._clock, self._price, self._chance = ledger, cast, clock, price, chance

    async def serve(self) -> None:
        """Serve one request with a random course."""
        chance = self._chance
        person = chance.choice([self._cast.bob, self._cast.charlie])
        entry = pending(person, price=chance.choice([None, self._price]), admitted_at=self._clock.now())
        try:
            await self._ledger.open(entry)
        except Overloaded:
            self.refused.add(entry.request_id)
            return
        self.admitted.add(entry.request_id)
        tokens = chance.randrange(50)
        self._ledger.checkpoint({entry.request_id: Usage(prompt_tokens=10, cached_tokens=2, completion_tokens=tokens)})
        course = chance.random()
        if course < 0.2:
            return  # still running when the process dies
        is_void = course < 0.35
        settlement = voided(entry.request_id) if is_void else posted(entry.request_id, completion=tokens)
        await self._ledger.settle(settlement)
        cost_picos = 0 if is_void or entry.price is None else 10 * entry.price.prompt + tokens * entry.price.completion
        self.settled[entry.request_id] = (settlement.status, cost_picos)
        if course > 0.8:
            await self._ledger.settle(settlement)


@pytest.mark.parametrize("has_journal", [True, False], ids=["journal", "tables"])
@pytest.mark.parametrize("seed", range(5))
async def test_every_admitted_request_is_in_the_ledger_once_and_none_stays_pending(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, seed: int, has_journal: bool
) -> None:
    chance = random.Random(seed)
    price = await euro_prices(database, clock).add(model="demo", currency="EUR", prompt=3, cached_prompt=1, completion=7)
    failing = FailingDatabase.around(database)
    admitted: set[str] = set()
    refused: set[str] = set()
    settled: dict[str, tuple[str, int]] = {}
    for _ in range(EPOCHS):
        journal = Journal(tmp_path / "journal") if has_journal else None
        epoch_id = await _begin(database, clock, journal)
        ledger = utc_ledger(failing, clock, epoch_id, checkpoint_interval_s=0.0, journal=journal)
        await ledger.start()
        owner = Owner(ledger, cast, clock, price, chance)
        tasks = [asyncio.create_task(owner.serve()) for _ in range(REQUESTS_PER_EPOCH)]
        failing.fail_before_commit, failing.fail_after_commit = chance.randrange(2), chance.randrange(3)
        await asyncio.gather(*tasks)
        failing.fail_before_commit = failing.fail_after_commit = 0
        await ledger.catch_up()
        await asyncio.gather(*(owner.serve() for _ in range(LAST)))
        await (ledger.stop() if chance.random() < 0.5 else kill_ledger(ledger))
        if journal is not None:
            await journal.close()
        admitted |= owner.admitted
        refused |= owner.refused
        settled |= owner.settled
    await _begin(database, clock, Journal(tmp_path / "journal") if has_journal else None)
    events = {event.request_id: event for event in await all_events(database)}
    assert len(events) == len(await all_events(database))
    assert admitted <= set(events)
    assert all(events[request_id].cost_picos == 0 for request_id in refused & set(events))
    for request_id, event in events.items():
        assert event.status != "pending"
        if request_id in settled:
            assert (event.status, event.cost_picos) == settled[request_id]
        elif request_id in admitted:
            assert (event.status, event.estimated) == ("recovered", True)


async def _begin(database: Database, clock: FakeClock, journal: Journal | None) -> str:
    """Settle what a dead epoch left behind, as a start does, and return the id of a new one."""
    if journal is not None:
        await replay(database, journal, clock, BillingCalendar(), without_alerts)
    epoch_id = await begin_epoch(database, clock, "test")
    await utc_recover(database, clock, epoch_id)
    return epoch_id
