"""Limits across restarts: nothing is granted twice, however often the process is killed; an orderly stop loses nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from appliance.base.db import Database
from appliance.base.errors import RateLimitExceeded
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.ledger.records import Usage
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.saved_levels import Levels, LevelSaver, read_levels
from appliance.metering.limits.sums import SavedLevel
from appliance.metering.limits.token_bucket import UNITS_PER_TOKEN, Take, TokenBucket
from appliance.tenancy.principals import Limits, Principal
from tests.support.cast import Cast
from tests.support.clock import START, FakeClock
from tests.support.factories import admission_request, pending, posted, voided
from tests.support.ledgers import utc_admission, utc_ledger, utc_recover, utc_sums

CAPACITY = 600
STEPS = 40


@dataclass
class Running:
    """A request that was admitted: what it holds, and what the bucket that never dies holds for it."""

    request_id: str
    reservation: Reservation
    twin: Take
    generated: int = 0


@dataclass
class Harness:
    """A process with limits that can be killed, and beside it one bucket that never is."""

    database: Database
    clock: FakeClock
    who: Principal
    person: Cast
    twin: TokenBucket
    running: list[Running] = field(default_factory=list)
    unsaved_refunds: int = 0

    async def start(self) -> None:
        self.epoch = await begin_epoch(self.database, self.clock, "test")
        await utc_recover(self.database, self.clock, self.epoch)
        self.ledger = utc_ledger(self.database, self.clock, self.epoch, checkpoint_interval_s=0.0)
        await self.ledger.start()
        self.admission = utc_admission(self.clock, utc_sums(self.database))
        self.levels = LevelSaver(self.database, self.admission)

    async def ask(self, tokens: int, output: int) -> None:
        asked = admission_request(self.who, tokens, output)
        try:
            reservation = await self.admission.admit(asked)
        except RateLimitExceeded:
            return
        reserved = reservation.reserved_tokens
        take = self.twin.take(reserved, self.clock.monotonic_s())
        assert take is not None, "a process that was killed gave what one that lives would not give"
        entry = pending(self.person.bob, admitted_at=self.clock.now(), prompt_tokens=tokens, reserved_tokens=reserved)
        await self.ledger.open(entry)
        self.running.append(Running(entry.request_id, reservation, take))

    async def end(self, request: Running, used: int) -> None:
        self.running.remove(request)
        if used:
            request.reservation.settle(used)
            await self.ledger.settle(posted(request.request_id, prompt=used, completion=0))
        else:
            request.reservation.void()
            await self.ledger.settle(voided(request.request_id))
        self.unsaved_refunds += max(request.reservation.reserved_tokens - used, 0)
        self.twin.settle(request.twin, used, self.clock.monotonic_s())

    async def save(self) -> None:
        await self.levels.save()
        self.unsaved_refunds = 0

    async def kill(self) -> None:
        """Lose everything that is in memory. What ran is billed what its last checkpoint says."""
        for request in self.running:
            tokens = request.generated
            if tokens:
                self.ledger.checkpoint({request.request_id: Usage(prompt_tokens=tokens)})
        await self.ledger.stop()
        lost = self.unsaved_refunds
        for request in self.running:
            reserved = request.reservation.reserved_tokens
            lost += max(reserved - request.generated, 0)
            self.twin.settle(request.twin, request.generated, self.clock.monotonic_s())
        self.running.clear()
        await self.start()
        await self.meet()
        assert self.twin_level() - lost <= self.level() <= self.twin_level()
        self.catch_up()

    def level(self) -> int:
        """Return the level of the process, which meets its tenant anew."""
        bucket = self.admission._allowances[Owner("tenant", self.who.tenant.id)].tokens
        assert bucket is not None
        return bucket.level(self.clock.monotonic_s())

    def twin_level(self) -> int:
        return self.twin.level(self.clock.monotonic_s())

    def catch_up(self) -> None:
        """From here on both are the same again: what was lost is lost."""
        more = self.twin_level() - self.level()
        if more > 0:
            self.twin.charge(more, self.clock.monotonic_s())

    async def meet(self) -> None:
        """Let the process read what it knows of the tenant."""
        await self.admission.dry_run(admission_request(self.who))


def make_harness(
    database: Database, clock: FakeClock, cast: Cast, *, capacity: int = CAPACITY, tokens_per_day: int | None = None
) -> Harness:
    limits = Limits(tokens_per_minute=capacity, tokens_per_day=tokens_per_day)
    who = dataclasses.replace(cast.bob.principal, tenant=dataclasses.replace(cast.bob.tenant, limits=limits))
    return Harness(database, clock, who, cast, TokenBucket(capacity, clock.monotonic_s()))


@pytest.mark.parametrize("seed", range(6))
async def test_repeated_kills_grant_no_more_than_a_run_without_any(
    database: Database, clock: FakeClock, cast: Cast, seed: int
) -> None:
    chance = random.Random(seed)
    harness = make_harness(database, clock, cast)
    await harness.start()
    await harness.ask(1, 0)
    await harness.save()  # of a level that was never saved only the last minute is known
    for _ in range(STEPS):
        clock.advance(chance.choice([0.001, 0.4, 1.0, 8.0, 61.0]))
        dice = chance.random()
        if dice < 0.45:
            await harness.ask(chance.randrange(1, 300), chance.choice([0, 100, 256]))
        elif dice < 0.7 and harness.running:
            request = chance.choice(harness.running)
            await harness.end(request, max(request.generated, chance.choice([0, 50, 300, 900])))
        elif dice < 0.8 and harness.running:
            chance.choice(harness.running).generated += chance.randrange(1, 400)
        elif dice < 0.92:
            await harness.save()
        else:
            await harness.kill()
    await harness.ledger.stop()


async def test_after_a_kill_a_day_admits_only_what_fits_beside_what_was_billed_of_running_requests(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    harness = make_harness(database, clock, cast, capacity=10_000, tokens_per_day=1000)
    await harness.start()
    await harness.ask(1, 700)
    await harness.ask(1, 800)  # more than is left
    await harness.ask(1, 1)
    assert len(harness.running) == 2
    harness.running[0].generated, harness.running[1].generated = 350, 600
    await harness.kill()
    await harness.ask(11, 40)
    assert harness.running == []
    await harness.ask(10, 40)
    assert len(harness.running) == 1
    await harness.ledger.stop()


async def test_usage_beyond_a_reservation_is_charged_at_the_end_of_the_request_not_at_its_admission(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    """It left a debt at its end; charged at its admission, the refill of all the time that it ran would have paid it."""
    harness = make_harness(database, clock, cast)
    await harness.start()
    await harness.ask(300, 0)
    await harness.save()
    clock.advance(1.0)
    await harness.ask(174, 0)
    clock.advance(61.0)
    await harness.end(harness.running[1], 900)
    await harness.kill()  # compares
    assert harness.level() == 600 - 726
    await harness.ledger.stop()


async def test_an_orderly_stop_saves_even_a_debt_of_an_hour(database: Database, clock: FakeClock, cast: Cast) -> None:
    harness = make_harness(database, clock, cast)
    await harness.start()
    await harness.ask(100, 0)
    await harness.end(harness.running[0], 20_000)
    clock.advance(0.001)
    await harness.save()
    before = harness.level()
    assert before == 500 - 19_900
    clock.advance(30)
    await harness.kill()
    await harness.meet()

    assert harness.level() == before + 300
    with pytest.raises(RateLimitExceeded) as refused:
        await harness.admission.admit(admission_request(harness.who, 1))
    assert refused.value.retry_after_s == 1910.099  # 19,101 tokens at ten a second, since a millisecond before it was saved
    await harness.ledger.stop()


async def test_levels_that_cannot_be_saved_are_saved_later(
    database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(database, clock, cast)
    await harness.start()
    await harness.ask(100, 0)
    with monkeypatch.context() as broken:
        broken.setattr(database, "batch_write", None)
        with pytest.raises(TypeError):
            await harness.levels.save()
    assert await harness.levels.save() == 1
    assert await harness.levels.save() == 0, "what did not change is not written again"
    await harness.end(harness.running[0], 100)
    await harness.ledger.stop()


async def test_saved_levels_are_about_a_second_old_at_most(database: Database, clock: FakeClock, cast: Cast) -> None:
    pauses: list[float] = []
    enough = asyncio.Event()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) > 3:
            enough.set()
            await asyncio.Event().wait()

    harness = make_harness(database, clock, cast)
    await harness.start()
    levels = LevelSaver(database, harness.admission, sleep=pause)
    levels.start()
    await enough.wait()
    await levels.stop()
    assert pauses == [1.0] * 4
    await harness.ledger.stop()


async def test_a_stop_writes_the_levels_changed_since_the_last_save(database: Database, clock: FakeClock, cast: Cast) -> None:
    harness = make_harness(database, clock, cast)
    await harness.start()
    harness.levels.start()
    await harness.ask(100, 0)
    await harness.levels.stop()
    assert await harness.levels.save() == 0
    await harness.end(harness.running[0], 100)
    await harness.ledger.stop()


async def test_nothing_is_written_after_a_stop(database: Database, clock: FakeClock, cast: Cast) -> None:
    levels = LevelSaver(database, utc_admission(clock, utc_sums(database)))
    levels.start()
    await levels.stop()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "limit levels"]


async def test_levels_for_one_model_and_over_all_models_are_saved_separately(database: Database) -> None:
    owners = [Owner("tenant", "a"), Owner("tenant", "a", "demo"), Owner("tenant", "a", "other")]
    saved: Levels = {
        owner: {"tokens": SavedLevel(capacity=number, units=number, saved_at=START)} for number, owner in enumerate(owners, 1)
    }
    source = SimpleNamespace(unsaved_levels=lambda: saved)
    await LevelSaver(database, source).save()
    async with database.reading() as connection:
        assert await read_levels(connection, owners) == saved


def test_a_level_is_saved_exactly() -> None:
    bucket = TokenBucket(7, 0.0)
    assert bucket.take(7, 0.0)
    again = TokenBucket(7, 1.000001, units=bucket.units(1.000001))
    assert again.units(1.000001) == 7 * 1_000_001
    assert again.units(60.0) == bucket.units(60.0) == 7 * UNITS_PER_TOKEN
