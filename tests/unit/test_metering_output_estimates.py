"""Output estimates after a start come from a key's last answers in the ledger. No request waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

import pytest
import structlog
from sqlalchemy import text

from appliance.base.db import Database
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits import output_estimates
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.ledger_sums import OUTPUTS_READ_MAX, outputs_query
from appliance.metering.limits.output_estimates import EXPECTED_OUTPUT_TOKENS, OUTPUTS_KEPT, OUTPUTS_MIN, AnswerLengths
from appliance.metering.limits.reservations import Reservation
from appliance.tenancy.principals import Limits, Principal
from tests.support.cast import Cast, Person
from tests.support.clock import START, FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import admission_request, pending, posted, principal
from tests.support.ledgers import utc_admission, utc_sums


async def answered(ledger: Ledger, clock: FakeClock, person: Person, lengths: list[int], model: str = "demo") -> None:
    """Serve requests with answers of these lengths, admitted one after the other."""
    entries = []
    for _ in lengths:
        clock.advance(1)
        entries.append(pending(person, model=model, admitted_at=clock.now()))
    await asyncio.gather(*(ledger.open(entry) for entry in entries))
    settlements = [posted(entry.request_id, completion=length) for entry, length in zip(entries, lengths, strict=True)]
    await asyncio.gather(*(ledger.settle(settlement) for settlement in settlements))


async def test_a_start_reads_the_last_answers_of_a_key_and_a_model(
    database: Database, clock: FakeClock, cast: Cast, ledger: Ledger
) -> None:
    await answered(ledger, clock, cast.bob, list(range(1, OUTPUTS_KEPT + 11)))
    await answered(ledger, clock, cast.bob, [7000], model="other")
    await answered(ledger, clock, cast.charlie, [9000])
    sums, now, bob = utc_sums(database), clock.now(), cast.bob.key.id
    clock.advance(1)
    await answered(ledger, clock, cast.bob, [8000])

    assert await sums.outputs(bob, "demo", now) == list(range(11, OUTPUTS_KEPT + 11)), "and none that this run has seen itself"
    assert await sums.outputs(bob, "other", now + timedelta(seconds=1)) == [7000]
    assert await sums.outputs(bob, "third", now) == []


async def test_after_a_restart_requests_reserve_what_they_would_have_before(
    database: Database, clock: FakeClock, cast: Cast, ledger: Ledger
) -> None:
    await answered(ledger, clock, cast.bob, [40] * OUTPUTS_MIN)
    clock.advance(1)
    for person, expected in ((cast.bob, 40), (cast.charlie, EXPECTED_OUTPUT_TOKENS)):
        started = utc_admission(clock, utc_sums(database))
        assert (await admit(started, person.principal)).reserved_tokens == 5 + EXPECTED_OUTPUT_TOKENS
        await started.output_estimates.read()
        assert (await admit(started, person.principal)).reserved_tokens == 5 + expected


async def admit(admission: Admission, who: Principal, model: str = "demo") -> Reservation:
    return await admission.admit(admission_request(who, 5, None, model=model))


class SlowHistory(EmptySums):
    """A ledger that returns the lengths of answers when the test lets it, and raises instead of returning None."""

    def __init__(self, *histories: Sequence[int] | None) -> None:
        self.histories = list(histories)
        self.go_on = asyncio.Event()
        self.reading = self.reading_most = 0

    async def outputs(self, key_id: str, model: str, before: datetime) -> list[int]:
        """Return the next history."""
        self.reading += 1
        self.reading_most = max(self.reading, self.reading_most)
        try:
            await self.go_on.wait()
        finally:
            self.reading -= 1
        history = self.histories.pop(0)
        if history is None:
            raise OSError("the disk is away")
        return list(history)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_no_first_request_waits_for_the_history_of_its_key(clock: FakeClock) -> None:
    slow, keys = SlowHistory(*[[40] * OUTPUTS_MIN] * 50), [principal() for _ in range(50)]
    admission = utc_admission(clock, slow)
    admission.output_estimates.start()
    for key in keys:
        assert (await admit(admission, key)).reserved_tokens == 5 + EXPECTED_OUTPUT_TOKENS
    await turns()
    assert slow.reading == 1
    slow.go_on.set()
    await turns(200)
    assert (slow.reading_most, slow.histories) == (1, [])
    assert [(await admit(admission, key)).reserved_tokens for key in keys] == [45] * 50
    await admission.output_estimates.stop()


async def test_answers_that_ended_while_the_history_was_read_come_after_it(clock: FakeClock) -> None:
    slow, bob = SlowHistory([3000] * 30 + [40] * (OUTPUTS_KEPT - 30)), principal()
    admission = utc_admission(clock, slow)
    for _ in range(10):
        (await admit(admission, bob)).settle(5 + 10)
    running = await admit(admission, bob)
    slow.go_on.set()
    await admission.output_estimates.read()
    for _ in range(9):
        (await admit(admission, bob)).settle(5 + 10)
    assert (await admit(admission, bob)).reserved_tokens == 3005, "11 of the last 100 were as long"
    running.settle(5 + 10)
    assert (await admit(admission, bob)).reserved_tokens == 45, "those of this run have put 20 of the long ones out"


async def test_a_key_whose_history_cannot_be_read_is_treated_as_new(clock: FakeClock) -> None:
    broken, bob, charlie = SlowHistory(None, [40] * OUTPUTS_MIN), principal(), principal()
    broken.go_on.set()
    admission = utc_admission(clock, broken)
    admission.output_estimates.start()
    with structlog.testing.capture_logs() as logs:
        for who in (bob, charlie):
            await admit(admission, who)
        await turns()
    assert [(line["event"], line["key_id"]) for line in logs] == [("lengths of earlier answers could not be read", bob.key.id)]
    assert (await admit(admission, bob)).reserved_tokens == 5 + EXPECTED_OUTPUT_TOKENS
    assert (await admit(admission, charlie)).reserved_tokens == 5 + 40
    await admission.output_estimates.stop()


async def test_recently_used_keys_and_those_with_running_answers_stay_in_memory(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_estimates, "PAIRS_KEPT", 3)
    admission, (bob, charlie, dora, eve) = utc_admission(clock, EmptySums()), [principal() for _ in range(4)]
    running = await admit(admission, bob)
    for who in (charlie, dora):
        for _ in range(OUTPUTS_MIN):
            (await admit(admission, who)).settle(5 + 40)
    (await admit(admission, charlie)).settle(5 + 40)
    (await admit(admission, eve)).void()  # bob is the oldest, but runs; then dora
    assert len(admission.output_estimates._lengths) == 3
    assert (await admit(admission, charlie)).reserved_tokens == 5 + 40
    assert (await admit(admission, dora)).reserved_tokens == 5 + EXPECTED_OUTPUT_TOKENS
    running.settle(5 + 40)


async def test_the_history_of_an_evicted_key_is_not_read(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_estimates, "PAIRS_KEPT", 1)
    history, (bob, charlie) = SlowHistory([], []), [principal() for _ in range(2)]
    history.go_on.set()
    admission = utc_admission(clock, history)
    for who in (bob, charlie):
        (await admit(admission, who)).void()
    await admission.output_estimates.read()
    assert len(history.histories) == 1


@pytest.mark.parametrize(("begin", "expected"), [(5, 40), (6, EXPECTED_OUTPUT_TOKENS)])
def test_a_running_answer_is_expected_to_be_short_while_nine_are_known_for_each(begin: int, expected: int) -> None:
    lengths = AnswerLengths(START)
    lengths.prepend([40] * 45)
    assert lengths.estimate(begin) == expected


async def test_a_request_that_waited_until_its_key_was_evicted_is_counted(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_estimates, "PAIRS_KEPT", 1)
    admission = utc_admission(clock, EmptySums())
    bob, others = principal(Limits(concurrent_requests=1)), [principal() for _ in range(3)]
    first = await admit(admission, bob)
    request = admission_request(bob, 5, None, model="other")
    waiting = asyncio.ensure_future(admission.admit(request, 60))
    await turns()
    for who in others:
        (await admit(admission, who)).void()
    first.settle(5 + 40)
    (await waiting).settle(5 + 40)
    assert len(admission.output_estimates._lengths) <= 2


async def test_a_shutdown_waits_for_no_history(clock: FakeClock) -> None:
    slow = SlowHistory([])
    admission = utc_admission(clock, slow)
    admission.output_estimates.start()
    await admit(admission, principal())
    await turns()
    assert slow.reading == 1
    await admission.output_estimates.stop()
    await admission.output_estimates.stop()
    assert slow.reading == 0
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "answer lengths"]


async def test_the_end_of_a_long_history_is_found_by_an_index(database: Database, clock: FakeClock, cast: Cast) -> None:
    query = outputs_query(cast.bob.key.id, "demo", clock.now())
    async with database.writing() as connection:
        compiled = str(query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))
        if database.kind == "postgresql":  # an empty table is read whole, or by whichever index has the right order
            for other_plan in ("enable_seqscan", "enable_sort"):
                await connection.execute(text(f"SET LOCAL {other_plan} = off"))
            await connection.execute(text("DROP INDEX ix_usage_events_admitted_at"))
        plan = (await connection.execute(text(f"EXPLAIN {'QUERY PLAN ' * (database.kind == 'sqlite')}{compiled}"))).all()
        await connection.rollback()
    assert "ix_usage_events_key_id_admitted_at" in f"{plan}"
    assert f"LIMIT {OUTPUTS_READ_MAX}" in " ".join(compiled.split()), "only the end of the history is read"
