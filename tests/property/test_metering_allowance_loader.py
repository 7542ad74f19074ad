"""First requests of many owners at once, in random order: slow and failing reads, cancelled clients, corrections and recorded
settlements meanwhile. Every owner is loaded once, and from then on everything counts exactly once."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping

import pytest

from appliance.base.errors import Refused
from appliance.metering.limits.owners import Owner, owners_of
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.sums import PeriodSums, SavedLevel
from appliance.metering.limits.token_bucket import UNITS_PER_TOKEN
from appliance.metering.limits.windows import Moment
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal
from tests.support.clock import START, FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import adjustment, admission_request, principal
from tests.support.ledgers import utc_admission

TENANTS, KEYS, REQUESTS = 4, 5, 150
PER_MINUTE, LEVEL, USED, AT_ONCE = 1000, 700, 4000, 6


class Books(EmptySums):
    """A ledger in which every owner has used something before. It may fail, and answers in any order."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.corrected: Counter[Owner] = Counter()
        self.settled: Counter[Owner] = Counter()
        self.records: set[str] = set()
        self.posting = 1
        self.failures = 0
        self.times_read: Counter[Owner] = Counter()

    async def read(
        self, currencies: Mapping[Owner, str], at: Moment, ended: Callable[[], Collection[str]]
    ) -> dict[Owner, PeriodSums]:
        """Return what was committed at some moment of the read."""
        await self.pause()
        asked = frozenset(ended())
        level = SavedLevel(capacity=PER_MINUTE, units=LEVEL * UNITS_PER_TOKEN, saved_at=at.now)
        found = {
            owner: PeriodSums(
                tokens_today=USED + self.corrected[owner] + self.settled[owner],
                cost_month_picos=0,
                through_posting=self.posting,
                included=asked & self.records,
                levels={"tokens": level},
            )
            for owner in currencies
        }
        await self.pause()
        if not self.failures or self.chance.random() < 0.4:
            self.failures += 1
            raise OSError("the disk is away")
        self.times_read.update(list(currencies))
        return found

    async def pause(self) -> None:
        """Let others go on for a while."""
        for _ in range(self.chance.randrange(8)):
            await asyncio.sleep(0)


class Harness:
    """Clients of a process that has just started, and what they were given."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.books = Books(self.chance)
        self.admission = utc_admission(FakeClock(), self.books)
        limits = Limits(tokens_per_minute=PER_MINUTE, concurrent_requests=AT_ONCE)
        self.people = [principal(limits, limits) for _ in range(TENANTS)]
        self.policy = ModelPolicy(model="demo", limits=Limits(concurrent_requests=50), limit_mode="enforce", updated_at=START)
        self.live: set[Reservation] = set()
        self.settled: Counter[Owner] = Counter()
        self.recording: list[asyncio.Task[None]] = []

    def somebody(self) -> Principal:
        """Return one of the keys."""
        person = self.chance.choice(self.people)
        key_id = f"{person.key.id} {self.chance.randrange(KEYS)}"
        return dataclasses.replace(person, key=dataclasses.replace(person.key, id=key_id))

    async def request(self, *, limited: bool) -> None:
        """Ask once, run for a while and settle or not, unless it is refused, or cancelled wherever it is."""
        await self.books.pause()
        asked = admission_request(self.somebody(), self.chance.randrange(1, 90), policy=self.policy if limited else None)
        try:
            reservation = await self.admission.admit(asked)
        except (Refused, OSError):
            return
        self.live.add(reservation)
        self.check()
        used = 0
        try:
            await self.books.pause()
            used = self.chance.choice([0, reservation.reserved_tokens, reservation.reserved_tokens // 2])
        finally:
            self.end(reservation, used)

    def end(self, reservation: Reservation, used: int) -> None:
        """Close it."""
        self.live.remove(reservation)
        if not used:
            reservation.void()
            return
        request_id = f"request {len(self.recording)}"
        reservation.settle(used, request_id=request_id)
        self.settled.update(dict.fromkeys(owners(reservation), used))
        self.recording.append(asyncio.create_task(self.record(reservation, request_id, used)))

    async def record(self, reservation: Reservation, request_id: str, used: int) -> None:
        """Commit what a request used, of which admission hears a little later."""
        await self.books.pause()
        self.books.settled.update(dict.fromkeys(owners(reservation), used))
        self.books.records.add(request_id)
        await self.books.pause()
        reservation.mark_recorded()

    async def correct(self) -> None:
        """Commit a correction, of which admission hears a little later."""
        await self.books.pause()
        who, tokens = self.somebody(), self.chance.randrange(-50, 50)
        self.books.posting += 1
        made = adjustment(who, posting=self.books.posting, completion_tokens=tokens)
        for owner in owners_of(made.tenant_id, made.key_id, made.model):
            self.books.corrected[owner] += tokens
        await self.books.pause()
        self.admission.correct(made)

    def check(self) -> None:
        """What runs stands at each of its owners, once, and no limit is passed."""
        for owner, allowance in self.admission._allowances.items():
            live = [each for each in self.live if owner in owners(each)]
            assert self.books.times_read[owner] == 1
            assert allowance.running == len(live)
            if allowance.tokens is not None:
                held = sum(each.reserved_tokens for each in live)
                assert allowance.tokens.level(1000.0) == LEVEL - held - self.settled[owner] >= 0
                assert allowance.running <= AT_ONCE


def owners(reservation: Reservation) -> tuple[Owner, ...]:
    """Return whose limits the request counts against, if they have any."""
    request = reservation.request
    return owners_of(request.tenant_id, request.key_id, request.model)


@pytest.mark.parametrize("seed", range(20))
async def test_every_owner_is_read_once_and_everything_counts_once(seed: int) -> None:
    harness = Harness(seed)
    limited_from = harness.chance.randrange(REQUESTS)
    requests, corrections = [], []
    for number in range(REQUESTS):
        requests.append(asyncio.create_task(harness.request(limited=number >= limited_from)))
        if harness.chance.random() < 0.1:
            corrections.append(asyncio.create_task(harness.correct()))
        if harness.chance.random() < 0.2:
            harness.chance.choice(requests[-10:]).cancel()
        for _ in range(harness.chance.randrange(3)):
            await asyncio.sleep(0)
    for answer in await asyncio.gather(*requests, *corrections, return_exceptions=True):
        assert answer is None or isinstance(answer, asyncio.CancelledError), answer
    await asyncio.gather(*harness.recording)
    await harness.admission.stop()

    harness.check()
    assert len(harness.admission._allowances) > TENANTS
    assert harness.books.failures > 0
    for owner, allowance in harness.admission._allowances.items():
        assert (allowance.running, allowance._windows.day.reserved) == (0, 0)
        assert allowance._windows.day.used == USED + harness.settled[owner] + harness.books.corrected[owner]
    loader = harness.admission._loader
    assert (loader._task, list(loader._queued), loader._loading, loader._corrections) == (None, [], {}, [])
    assert (loader._ended, loader._recorded) == ({}, [])
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "allowance loader"]
