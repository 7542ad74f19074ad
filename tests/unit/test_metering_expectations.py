"""What a start knows of the answers that a key got before it: the last ones of the ledger, by an index."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text

from appliance.base.db import Database
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.expectations import EXPECTED_OUTPUT_TOKENS, OUTPUTS_KEPT, OUTPUTS_MIN
from appliance.metering.limits.rules import Asked
from appliance.metering.limits.sums import OUTPUTS_READ_MAX, LedgerSums, outputs_query
from tests.support.cast import Cast, Person
from tests.support.clock import FakeClock
from tests.support.factories import pending, posted


@pytest.fixture
async def ledger(database: Database, clock: FakeClock, cast: Cast) -> AsyncIterator[Ledger]:
    ledger = Ledger(database, clock, cast.epoch_id)
    await ledger.start()
    yield ledger
    await ledger.stop()


async def answered(ledger: Ledger, clock: FakeClock, person: Person, lengths: list[int], model: str = "demo") -> None:
    """Serve requests whose answers are so long, one after the other."""
    for length in lengths:
        clock.advance(1)
        entry = pending(person, model=model, admitted_at=clock.now())
        await ledger.open(entry)
        await ledger.settle(posted(entry.request_id, completion=length))


async def test_a_start_reads_the_last_answers_of_a_key_and_a_model(
    database: Database, clock: FakeClock, cast: Cast, ledger: Ledger
) -> None:
    await answered(ledger, clock, cast.bob, list(range(1, OUTPUTS_KEPT + 11)))
    await answered(ledger, clock, cast.bob, [7000], model="other")
    await answered(ledger, clock, cast.charlie, [9000])
    sums = LedgerSums(database)

    assert await sums.outputs(cast.bob.key.id, "demo") == list(range(11, OUTPUTS_KEPT + 11))
    assert await sums.outputs(cast.bob.key.id, "other") == [7000]
    assert await sums.outputs(cast.bob.key.id, "third") == []


async def test_after_a_restart_a_request_holds_what_it_would_have_held_before(
    database: Database, clock: FakeClock, cast: Cast, ledger: Ledger
) -> None:
    await answered(ledger, clock, cast.bob, [40] * OUTPUTS_MIN)
    for person, expected in ((cast.bob, 40), (cast.charlie, EXPECTED_OUTPUT_TOKENS)):
        asked = Asked(principal=person.principal, model="demo", prompt_tokens=5, max_output_tokens=None, price=None)
        started = Admission(clock, LedgerSums(database))
        assert (await started.admit(asked)).tokens_reserved == 5 + expected


async def test_the_end_of_a_long_history_is_found_by_an_index(database: Database, cast: Cast) -> None:
    query = outputs_query(cast.bob.key.id, "demo")
    async with database.reading() as connection:
        asked = str(query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True}))
        if database.kind == "postgresql":
            for other_way in ("enable_seqscan", "enable_sort"):  # an empty table is read whole
                await connection.execute(text(f"SET LOCAL {other_way} = off"))
        plan = (await connection.execute(text(f"EXPLAIN {'QUERY PLAN ' * (database.kind == 'sqlite')}{asked}"))).all()
    assert "ix_usage_events_key_id_admitted_at" in f"{plan}"
    assert f"LIMIT {OUTPUTS_READ_MAX}" in " ".join(asked.split()), "however long it is, only its end is looked at"
