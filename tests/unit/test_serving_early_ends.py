"""However a running request ends, its event has the engine's token count and the reason."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import pytest
import structlog

from appliance.base.db import Database
from appliance.base.errors import GatehouseError, InternalError, RequestExceedsLimit
from appliance.serving.endings import EARLY_ENDS, early_end
from appliance.serving.generation import Generation
from appliance.tenancy.keys import Keys
from appliance.tenancy.principals import KeyChanges, Limits, TenantChanges
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tiers import Tiers
from tests.support.cast import OWNER, PEPPER, Cast, Person, change_tenant
from tests.support.clock import FakeClock
from tests.support.fake_engine import FAIL, HALF, LATE, STALL
from tests.support.generations import Serving, open_serving, open_watching_serving, text_of
from tests.support.ledgers import euro_prices, num_running, num_waiting
from tests.support.polling import poll_until

pytestmark = pytest.mark.on_either_database

TEXT = "the quick brown fox"
POSITIONS = (0, 1, 2, 3, 6, 11)  # before, at and after the first token
MICROS = 1_000_000  # price: one micro-unit per token


@pytest.fixture
async def serving(database: Database, clock: FakeClock, cast: Cast, tmp_path: Path) -> AsyncIterator[Serving]:
    async with open_watching_serving(database, clock, tmp_path / "model", cast.epoch_id) as opened:
        yield opened


async def begun(serving: Serving, person: Person, position: int, **sampling: object) -> Generation:
    """Return a generation of which the engine has generated exactly `position` tokens, all received by the gateway."""
    serving.engine.allow_steps(position)
    generation = await serving.start(person, TEXT, max_tokens=1000, **sampling)
    await poll_until(lambda: generation.live.completion_tokens == position)
    return generation


async def check(serving: Serving, generation: Generation, reason: str, cause: str | None, *, running: int = 0) -> None:
    """Check that the event has the engine's own count, the reason and the cause."""
    outcome = await generation.outcome
    event = await serving.event(generation)
    counted, computed = (count[generation.request_id] for count in (serving.engine.counted, serving.engine.computed))
    assert (event.finish_reason, event.cause) == (reason, cause)
    assert event.completion_tokens == outcome.usage.completion_tokens == counted
    assert event.status == ("posted" if computed else "voided")
    assert event.prompt_tokens == computed
    assert num_running(serving.admission, event.tenant_id) == running


@pytest.mark.parametrize("why", EARLY_ENDS)
async def test_an_early_end_at_any_position_bills_the_engines_count(serving: Serving, cast: Cast, why: str) -> None:
    for position in POSITIONS:
        generation = await begun(serving, cast.bob, position)
        generation.end_early(why)
        await check(serving, generation, early_end(why).finish_reason, early_end(why).cause)


async def test_tokens_generated_before_the_abort_arrives_count_too(serving: Serving, cast: Cast) -> None:
    for position in POSITIONS:
        generation = await begun(serving, cast.bob, position)
        serving.engine.allow_steps(3)  # the engine continues until the abort reaches it
        generation.end_early("disconnected")
        await check(serving, generation, "disconnected", "client")


@pytest.mark.parametrize("position", POSITIONS[::2])
async def test_tokens_of_all_answers_count(serving: Serving, cast: Cast, position: int) -> None:
    serving.engine.allow_steps(position)
    generation = await serving.start(cast.bob, TEXT, max_tokens=1000, n=3)
    await poll_until(lambda: generation.live.completion_tokens == 3 * position)
    serving.engine.allow_steps(2)
    generation.end_early("aborted")
    await check(serving, generation, "aborted", "administrator")


async def test_when_one_answer_fails_its_siblings_are_counted_to_their_last_token(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [HALF, 5], n=3, max_tokens=1000)
    await check(serving, generation, "error", "engine_error")
    assert serving.engine.counted[generation.request_id] > 0


@pytest.mark.parametrize(("first", "reason", "cause"), [(FAIL, "error", "engine_error"), (LATE, "deadline", "queue_deadline")])
async def test_a_request_ended_by_the_engine_has_reason_and_cause(
    serving: Serving, cast: Cast, first: int, reason: str, cause: str
) -> None:
    generation = await serving.start(cast.bob, [first, 5])
    await check(serving, generation, reason, cause)


async def test_a_request_aborted_by_the_engine_on_its_own_is_an_internal_error(serving: Serving, cast: Cast) -> None:
    generation = await begun(serving, cast.bob, 3)
    serving.client.abort(generation.request_id)  # the engine ends it without a request of the generation
    await check(serving, generation, "aborted", "engine_ended")
    error = (await generation.outcome).error
    assert isinstance(error, InternalError)
    assert "the engine ended" in error.message


@pytest.mark.parametrize("position", POSITIONS[::2])
async def test_when_the_engine_dies_the_reported_tokens_are_billed(serving: Serving, cast: Cast, position: int) -> None:
    generation = await begun(serving, cast.bob, position)
    serving.engine_task.cancel()
    await check(serving, generation, "error", "engine_died")


@pytest.mark.parametrize("answers", [1, 2])
async def test_a_request_past_its_deadline_has_that_reason(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, answers: int
) -> None:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id, deadline_s=0.05) as serving:
        generation = await serving.start(cast.bob, [STALL, 5], n=answers)
        await check(serving, generation, "deadline", "request_deadline")


async def test_requests_ended_by_a_shutdown_have_that_cause(serving: Serving, cast: Cast) -> None:
    generation = await begun(serving, cast.bob, 3)
    await serving.generations.stop(5.0)
    assert generation.outcome.done()
    assert not {"access watch", "checkpoints"} & {task.get_name() for task in asyncio.all_tasks()}
    await check(serving, generation, "aborted", "shutdown")


Change = Callable[[Keys, Tenants, Person, FakeClock], object]
CHANGES: dict[str, Change] = {
    "key_revoked": lambda keys, _tenants, bob, _clock: keys.revoke(bob.key.id, access=OWNER),
    "key_expired": lambda keys, _tenants, bob, clock: keys.update(
        bob.key.id, KeyChanges(expires_at=clock.now() + timedelta(milliseconds=20)), access=OWNER
    ),
    "tenant_suspended": lambda _keys, tenants, bob, _clock: change_tenant(tenants, bob, suspended=True),
    "tenant_archived": lambda _keys, tenants, bob, _clock: tenants.archive(bob.tenant.id, access=OWNER),
}


@pytest.mark.parametrize("cause", CHANGES)
async def test_losing_access_ends_running_requests_of_that_key_or_tenant_only(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast, cause: str
) -> None:
    bobs, charlies = await begun(serving, cast.bob, 4), await serving.start(cast.charlie, TEXT, max_tokens=1000)
    await CHANGES[cause](Keys(database, clock, PEPPER), Tenants(database, clock), cast.bob, clock)  # type: ignore[misc]
    outcome = await bobs.outcome

    assert isinstance(outcome.error, GatehouseError)
    assert not charlies.outcome.done()
    await check(serving, bobs, "aborted", cause)
    charlies.end_early("disconnected")
    await check(serving, charlies, "disconnected", "client")


async def test_the_end_of_a_rotations_grace_period_ends_requests_of_the_old_key(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast
) -> None:
    keys = Keys(database, clock, PEPPER)
    old = await begun(serving, cast.bob, 2)
    successor, secret = await keys.rotate(cast.bob.key.id, grace_s=1, access=OWNER)
    new = await serving.start(Person(tenant=cast.bob.tenant, key=successor, secret=secret), TEXT, max_tokens=1000)
    assert not old.outcome.done()
    clock.advance(1)
    await serving.generations._watch.check()
    await check(serving, old, "aborted", "key_expired", running=1)
    assert not new.outcome.done()
    new.end_early("disconnected")
    await new.outcome


@pytest.mark.parametrize("ago_s", [0, 60])
async def test_a_request_ends_at_once_when_its_key_expires(serving: Serving, clock: FakeClock, cast: Cast, ago_s: int) -> None:
    generation = await begun(serving, cast.bob, 2)
    generation.set_expiry(clock.now() - timedelta(seconds=ago_s))
    timer = generation._expiry._timer
    assert timer is not None
    assert timer.when() <= asyncio.get_running_loop().time()
    await check(serving, generation, "aborted", "key_expired")


async def test_a_postponed_expiry_ends_nothing(serving: Serving, clock: FakeClock, cast: Cast) -> None:
    generation = await begun(serving, cast.bob, 2)
    generation.set_expiry(clock.now())
    generation.set_expiry(clock.now() + timedelta(days=1))
    for _turn in range(5):
        await asyncio.sleep(0)
    generation.end_early("disconnected")
    await check(serving, generation, "disconnected", "client")


async def hard_budget(database: Database, clock: FakeClock, bob: Person, micros: int, *, cut: bool = True) -> Person:
    """Return Bob with a monthly budget and a price of one micro-unit per token."""
    await euro_prices(database, clock).add(
        model="tiny", currency="EUR", prompt=MICROS, cached_prompt=MICROS, completion=MICROS, effective_from=clock.now()
    )
    changes = TenantChanges(limits=Limits(monthly_budget=micros), cut_at_budget=cut)
    return dataclasses.replace(bob, tenant=await Tenants(database, clock).update(bob.tenant.id, changes, access=OWNER))


async def test_a_hard_budget_ends_the_answer_at_the_token_that_exhausts_it(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast
) -> None:
    prompt = len(serving.ids(TEXT))
    bob = await hard_budget(database, clock, cast.bob, prompt + 300)
    serving.engine.allow_steps(299)
    generation = await serving.start(bob, TEXT, max_tokens=1000)
    await poll_until(lambda: generation.live.completion_tokens == 299)
    assert not generation.outcome.done()
    serving.engine.allow_steps(1)
    outcome = await generation.outcome

    assert outcome.error is not None
    assert (outcome.error.code, outcome.usage.completion_tokens) == ("budget_exceeded", 300)
    await check(serving, generation, "aborted", "budget_exceeded")


async def test_concurrent_requests_together_exhaust_a_hard_budget(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast
) -> None:
    prompt = len(serving.ids(TEXT))
    bob = await hard_budget(database, clock, cast.bob, 2 * prompt + 600)
    serving.engine.allow_steps(0)
    both = [await serving.start(bob, TEXT, max_tokens=300), await serving.start(bob, TEXT, max_tokens=1000)]
    serving.engine.allow_steps(1000)
    outcomes = [await generation.outcome for generation in both]

    assert [outcome.finish_reason for outcome in outcomes] == ["length", "aborted"]
    await check(serving, both[0], "length", None)
    await check(serving, both[1], "aborted", "budget_exceeded")
    assert outcomes[1].usage.completion_tokens >= 300


async def test_lowering_a_hard_budget_ends_running_requests_at_their_next_token(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast
) -> None:
    prompt = len(serving.ids(TEXT))
    generation = await begun(serving, await hard_budget(database, clock, cast.bob, prompt + 1000), 5)
    lowered = TenantChanges(limits=Limits(monthly_budget=prompt + 5))
    await Tenants(database, clock).update(cast.bob.tenant.id, lowered, access=OWNER)
    await serving.generations._watch.check()
    serving.engine.allow_steps(1)
    await check(serving, generation, "aborted", "budget_exceeded")


@pytest.mark.parametrize(("before", "end"), [(False, ("aborted", "budget_exceeded")), (True, ("length", None))])
async def test_a_budget_can_be_made_hard_or_soft_while_a_request_runs(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast, before: bool, end: tuple[str, str | None]
) -> None:
    bob = await hard_budget(database, clock, cast.bob, len(serving.ids(TEXT)) + 300, cut=before)
    serving.engine.allow_steps(0)
    generation = await serving.start(bob, TEXT, max_tokens=1000)
    serving.engine.allow_steps(290)
    await poll_until(lambda: generation.live.completion_tokens == 290)

    await change_tenant(Tenants(database, clock), bob, cut_at_budget=not before)
    await serving.generations._watch.check()
    serving.engine.allow_steps(710)
    await check(serving, generation, *end)


async def test_a_soft_budget_never_cuts_an_answer(serving: Serving, database: Database, clock: FakeClock, cast: Cast) -> None:
    bob = await hard_budget(database, clock, cast.bob, 300, cut=False)
    generation = await serving.start(bob, TEXT, max_tokens=500)
    await text_of(generation)

    await check(serving, generation, "length", None)


async def test_a_change_of_limits_reaches_requests_that_wait_for_admission(
    serving: Serving, database: Database, clock: FakeClock, cast: Cast
) -> None:
    tenants = Tenants(database, clock)
    await Tiers(database, clock).update(cast.bob.tenant.tier, admission_wait_ms=60_000)
    tenant = await change_tenant(tenants, cast.bob, limits=Limits(concurrent_requests=1))
    bob = dataclasses.replace(cast.bob, tenant=tenant)
    running = await begun(serving, bob, 2)
    first, second = (asyncio.create_task(serving.start(bob, TEXT, max_tokens=1000)) for _ in range(2))
    await poll_until(lambda: num_waiting(serving.admission) == 2)

    await change_tenant(tenants, bob, limits=Limits(concurrent_requests=2))
    admitted = await first
    assert num_waiting(serving.admission) == 1
    await change_tenant(tenants, bob, limits=Limits(concurrent_requests=0))
    with pytest.raises(RequestExceedsLimit):
        await second
    for generation in (running, admitted):
        generation.end_early("disconnected")
        await generation.outcome


async def test_keys_that_cannot_be_checked_are_logged_once_with_the_number_of_failures_at_the_end(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outages = [OSError("down")] * 3

    async def check() -> None:
        if outages:
            raise outages.pop()

    monkeypatch.setattr("appliance.serving.access_watch.RETRY_S", 0.0)
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id) as serving:
        watch = serving.generations._watch
        monkeypatch.setattr(watch, "check", check)
        with structlog.testing.capture_logs() as logs:
            serving.generations.start_watching()
            watch._check_due.set()
            await poll_until(lambda: len(logs) > 1)
            await serving.generations.stop(5.0)
    failure = "keys of running requests could not be checked"
    assert [(line["event"], line.get("after"), line["failures"]) for line in logs] == [
        (failure, None, 1),
        ("works again", failure, 3),
    ]


async def test_a_checkpoint_that_fails_is_logged_and_the_next_one_follows(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    async def fail_once() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise ValueError("a bug")

    monkeypatch.setattr("appliance.serving.generations.CHECKPOINT_INTERVAL_S", 0.0)
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id) as serving:
        monkeypatch.setattr(serving.generations, "checkpoint", fail_once)
        with structlog.testing.capture_logs() as logs:
            serving.generations.start_watching()
            await poll_until(lambda: len(calls) > 1)
            await serving.generations.stop(5.0)
    assert [line["event"] for line in logs] == ["running requests could not be checkpointed", "works again"]
