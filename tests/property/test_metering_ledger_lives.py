"""The ledger under random use, failing databases and deaths: each admitted request once, none pending, costs that add up."""

from __future__ import annotations

import asyncio
import random

import pytest

from appliance.base.db import Database
from appliance.base.errors import Overloaded
from appliance.metering.ledger.recovery import begin_epoch, recover
from appliance.metering.ledger.writer import Checkpoint, Ledger
from appliance.metering.prices import Price, PriceBook
from tests.support.cast import Cast
from tests.support.clock import FakeClock
from tests.support.factories import pending, posted, voided
from tests.support.ledgers import FailingDatabase, all_events, settle

REQUESTS_PER_EPOCH = 25
EPOCHS = 3


class Owner:
    """Plays the tasks that own generations, and keeps its own plain book of what they were told."""

    def __init__(self, ledger: Ledger, cast: Cast, clock: FakeClock, price: Price, chance: random.Random) -> None:
        self.refused: set[str] = set()
        self.settled: dict[str, tuple[str, int]] = {}
        self.admitted: set[str] = set()
        self._ledger, self._cast, self._clock, self._price, self._chance = ledger, cast, clock, price, chance

    async def serve(self) -> None:
        """Take one request through a life that chance decides."""
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
        self._ledger.checkpoint(
            [Checkpoint(request_id=entry.request_id, prompt_tokens=10, cached_tokens=2, completion_tokens=tokens)]
        )
        fate = chance.random()
        if fate < 0.2:
            return  # still running when the process dies
        settlement = voided(entry.request_id) if fate < 0.35 else posted(entry.request_id, completion=tokens)
        event = await settle(self._ledger, settlement)
        self.settled[entry.request_id] = (event.status, event.cost_picos)
        if fate > 0.8:
            assert await settle(self._ledger, settlement) == event


@pytest.mark.parametrize("seed", range(5))
async def test_every_admitted_request_is_in_the_ledger_once_and_none_stays_pending(
    database: Database, clock: FakeClock, cast: Cast, seed: int
) -> None:
    chance = random.Random(seed)
    price = await PriceBook(database, clock).add(model="demo", currency="EUR", prompt=3, cached_prompt=1, completion=7)
    failing = FailingDatabase.around(database)
    admitted: set[str] = set()
    refused: set[str] = set()
    settled: dict[str, tuple[str, int]] = {}
    for _ in range(EPOCHS):
        epoch_id = await begin_epoch(database, clock, "test")
        await recover(database, clock, epoch_id)
        ledger = Ledger(failing, clock, epoch_id, checkpoint_interval_s=0.0)
        await ledger.start()
        owner = Owner(ledger, cast, clock, price, chance)
        lives = [asyncio.create_task(owner.serve()) for _ in range(REQUESTS_PER_EPOCH)]
        failing.fail_before_commit, failing.fail_after_commit = chance.randrange(2), chance.randrange(3)
        await asyncio.gather(*lives)
        failing.fail_before_commit = failing.fail_after_commit = 0
        await _die(ledger, in_order=chance.random() < 0.5)
        admitted |= owner.admitted
        refused |= owner.refused
        settled |= owner.settled
    await recover(database, clock, await begin_epoch(database, clock, "last"))
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


async def _die(ledger: Ledger, *, in_order: bool) -> None:
    """End the ledger: in order, or as a killed process would, in the middle of whatever it does."""
    if in_order:
        await ledger.stop()
        return
    assert ledger._task is not None
    ledger._task.cancel()
    await asyncio.wait({ledger._task})
