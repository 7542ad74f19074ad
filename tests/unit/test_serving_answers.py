"""Several answers to one request: each ends independently, all share one bill, and nothing is left behind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from appliance.base.db import Database
from appliance.base.errors import EngineUnavailable, InternalError, InvalidValue, Overloaded
from appliance.metering.ledger.records import Settlement
from appliance.serving.chunks import Chunk
from appliance.serving.explanation import explain_live
from appliance.serving.generation import Generation
from appliance.tenancy import fields
from appliance.tenancy.principals import Limits
from appliance.tenancy.tenants import Tenants
from engine.protocol import WEIGHT_MAX, FinishReason, GenerationRequest, Priority, RequestProgress, TokenEvent
from tests.support.cast import OWNER, Cast, Person, change_tenant, make_person
from tests.support.clock import FakeClock
from tests.support.fake_engine import BLAME, BUSY, FAIL, HALF, LATE, STALL, make_event
from tests.support.generations import Serving, open_serving
from tests.support.ledgers import num_running
from tests.support.polling import poll_until
from tests.support.received_events import sending

pytestmark = pytest.mark.on_either_database

TEXT = "the quick brown fox — é 漢"


@pytest.fixture
async def serving(database: Database, clock: FakeClock, cast: Cast, tmp_path: Path) -> AsyncIterator[Serving]:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id, queue_deadline_s=7.5) as opened:
        yield opened


def first_says_fox(serving: Serving) -> list[int]:
    """Return a prompt whose first answer says fox at once and whose second one only much later."""
    return [*serving.ids("fox"), *serving.ids("a") * 900]


async def texts_of(generation: Generation) -> list[str]:
    """Return the whole text of each answer."""
    texts = [""] * generation.live.num_answers
    while not generation.chunks.ended:
        for chunk in await generation.chunks.take(10.0):
            texts[chunk.index] += chunk.text
    return texts


async def test_each_answer_has_its_own_text_and_the_prompt_is_billed_once(serving: Serving, cast: Cast) -> None:
    ids = serving.ids(TEXT)
    generation = await serving.start(cast.bob, TEXT, n=3)
    texts = await texts_of(generation)
    outcome = await generation.outcome
    event = await serving.event(generation)

    assert texts == [serving.text((ids + ids)[index : index + len(ids)]) for index in range(3)]
    assert outcome.finish_reasons == ("length",) * 3
    assert (event.status, event.finish_reason) == ("posted", "length")
    assert event.prompt_tokens == len(ids)
    assert event.completion_tokens == outcome.usage.completion_tokens == 3 * len(ids)
    assert len((await serving.reports.ledger_page(access=OWNER)).data) == 1
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_a_stop_string_ends_only_its_own_answer(serving: Serving, cast: Cast) -> None:
    ids = serving.ids(TEXT)
    generation = await serving.start(cast.bob, TEXT, n=2, stop=["the quick"], max_tokens=len(ids))
    texts = await texts_of(generation)
    outcome = await generation.outcome
    stopped_at = next(n for n in range(1, 99) if "the quick" in serving.text(ids[:n]))

    assert texts == ["", serving.text([*ids[1:], ids[0]])]
    assert outcome.finish_reasons == ("stop", "length")
    assert outcome.finish_reason == "length"
    assert outcome.usage.completion_tokens == stopped_at + len(ids)
    assert [frame.abort_answers for frame in serving.engine.frames if frame.abort_answers] == [[(generation.request_id, 0)]]
    assert [frame.abort for frame in serving.engine.frames if frame.abort] == []


async def test_a_request_ends_when_every_answer_has_hit_its_stop_string(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT, n=2, stop=["quick"], max_tokens=1000)
    outcome = await generation.outcome

    assert outcome.finish_reasons == ("stop", "stop")
    assert (await serving.event(generation)).finish_reason == "stop"
    await poll_until(lambda: not serving.engine._live)


async def test_the_end_of_an_answer_is_reported_before_its_siblings_end(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, first_says_fox(serving), n=2, stop=["fox"], max_tokens=900)
    ended: list[Chunk] = []
    while not ended:
        ended += [chunk for chunk in await generation.chunks.take(10.0) if chunk.finish_reason is not None]

    assert [(chunk.index, chunk.finish_reason) for chunk in ended] == [(0, "stop")]
    assert not generation.outcome.done()
    generation.end_early("disconnected")
    assert (await generation.outcome).finish_reasons == ("stop", "disconnected")


async def test_one_answer_that_fails_ends_the_request_and_its_siblings(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [HALF, 5], n=3, max_tokens=1000)
    outcome = await generation.outcome

    assert outcome.finish_reasons == ("error",) * 3
    assert outcome.error is not None
    assert generation.live.error == outcome.error.message
    assert isinstance(outcome.error, InternalError)
    assert (await serving.event(generation)).finish_reason == "error"
    await poll_until(lambda: not serving.engine._live)
    await poll_until(lambda: serving.client._client.open_requests == 0)


@pytest.mark.parametrize("n", [1, 2])
async def test_an_answer_that_hit_its_stop_string_is_aborted_once(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    aborted: list[tuple[object, ...]] = []
    monkeypatch.setattr(serving.client, "abort", lambda *given: aborted.append(given))  # an abort that comes too late
    monkeypatch.setattr(serving.client, "abort_answer", lambda *given: aborted.append(given))
    generation = await serving.start(cast.bob, first_says_fox(serving), n=n, stop=["fox"], max_tokens=50)
    outcome = await generation.outcome

    assert outcome.finish_reasons[0] == "stop"
    assert aborted == [(generation.request_id,) if n == 1 else (generation.request_id, 0)]


@pytest.mark.parametrize("first", [HALF, FAIL], ids=["one fails", "all fail"])
async def test_when_one_answer_fails_the_others_are_aborted_once(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(serving.client, "abort", aborted.append)
    generation = await serving.start(cast.bob, [first, 5], n=3, max_tokens=50)
    outcome = await generation.outcome

    assert isinstance(outcome.error, InternalError)
    assert aborted == [generation.request_id]


async def test_a_request_whose_answers_all_fail_ends_at_once(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [FAIL, 5], n=4)
    outcome = await generation.outcome

    assert isinstance(outcome.error, InternalError)
    assert (await serving.event(generation)).status == "voided"


async def test_a_disconnect_ends_every_answer(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT, n=3, max_tokens=1000)
    await generation.chunks.take(10.0)
    generation.end_early("disconnected")
    outcome = await generation.outcome
    event = await serving.event(generation)

    assert (outcome.finish_reason, outcome.error) == ("disconnected", None)
    assert event.completion_tokens == sum(answer.completion_tokens for answer in generation._answers) >= 1


async def test_an_engine_that_dies_leaves_complete_answers_complete(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, first_says_fox(serving), n=2, stop=["fox"], max_tokens=900)
    while not any(answer.finish_reason for answer in generation._answers):
        await generation.chunks.take(10.0)
    serving.engine_task.cancel()
    outcome = await generation.outcome

    assert isinstance(outcome.error, EngineUnavailable)
    assert outcome.finish_reasons == ("stop", "error")


@pytest.mark.parametrize("n", [1, 2])
async def test_when_the_engine_dies_after_all_answers_hit_their_stop_strings_the_request_is_complete(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(serving.client, "abort", lambda _request_id: serving.engine_task.cancel())
    monkeypatch.setattr(
        serving.client, "abort_answer", lambda _request_id, index: index == n - 1 and serving.engine_task.cancel()
    )
    generation = await serving.start(cast.bob, TEXT, n=n, stop=["quick"], max_tokens=900)
    outcome = await generation.outcome
    event = await serving.event(generation)

    assert (outcome.finish_reasons, outcome.error) == (("stop",) * n, None)
    assert (event.status, event.finish_reason) == ("posted", "stop")


@pytest.mark.parametrize(
    ("first", "second", "reasons", "cause"),
    [
        ("stops", "ends", ("stop", "length"), None),
        ("fails", "stops", ("error", "stop"), "engine_error"),
        ("fails", "goes on", ("error", "error"), "engine_error"),
    ],
)
async def test_when_the_engine_dies_each_answer_counts_as_last_reported(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch,
    first: str, second: str, reasons: tuple[str, str], cause: str | None,
) -> None:  # fmt: skip
    fox, more = serving.ids("the fox"), serving.ids("the quick")

    def event(request: GenerationRequest, index: int, does: str) -> TokenEvent:
        if does == "fails":
            return make_event(request, [], 0, index=index, finish_reason=FinishReason.ERROR, error="no memory")
        ids = fox if does == "stops" else more
        end = FinishReason.LENGTH if does == "ends" else None
        return make_event(request, ids, len(ids), index=index, finish_reason=end)

    def events(request: GenerationRequest) -> list[TokenEvent]:
        return [event(request, index, does) for index, does in enumerate((first, second))]

    monkeypatch.setattr(serving.client, "submit", sending(events, then_dies=True))
    generation = await serving.start(cast.bob, TEXT, n=2, stop=["fox"])
    outcome = await generation.outcome
    recorded = await serving.event(generation)

    assert (outcome.finish_reasons, recorded.cause, outcome.error is None) == (reasons, cause, cause is None)
    assert recorded.completion_tokens == sum(answer.completion_tokens for answer in generation._answers) > 0


async def test_output_before_an_error_of_a_field_stays_billed(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events(request: GenerationRequest) -> list[TokenEvent]:
        some = make_event(request, request.prompt_token_ids, len(request.prompt_token_ids))
        blamed = make_event(request, [], some.num_output_tokens, finish_reason=FinishReason.ERROR, error_param="guided_json")
        return [some, blamed]

    monkeypatch.setattr(serving.client, "submit", sending(events))
    generation = await serving.start(cast.bob, TEXT, field_names={"guided_json": "response_format"})
    outcome = await generation.outcome
    event = await serving.event(generation)

    assert isinstance(outcome.error, InvalidValue)
    assert (outcome.error.param, outcome.error.message) == ("response_format", "response_format cannot be honoured")
    assert (event.status, event.finish_reason, event.cause) == ("posted", "error", "invalid_request")
    assert event.completion_tokens == len(serving.ids(TEXT))


async def test_a_slow_reader_of_several_answers_gets_everything(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id, buffer_chunks=1) as serving:
        generation = await serving.start(cast.bob, TEXT, n=3)
        await generation.outcome
        chunks = await generation.chunks.take(1.0)
        ids = serving.ids(TEXT)

        assert sorted(chunk.index for chunk in chunks) == [0, 1, 2]
        assert {chunk.index: chunk.text for chunk in chunks}[2] == serving.text((ids + ids)[2 : 2 + len(ids)])


async def test_a_read_of_the_ledger_knows_of_requests_that_ended_but_are_not_settled(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[list[str]] = []
    settle = serving.ledger.settle

    async def settle_seen(settlement: Settlement, on_recorded: Callable[[], object]) -> None:
        ended.append(list(serving.admission._loader._ended))
        await settle(settlement, on_recorded)

    monkeypatch.setattr(serving.ledger, "settle", settle_seen)
    generation = await serving.start(cast.bob, TEXT)
    await generation.outcome
    await poll_until(lambda: not serving.admission._loader._ended)
    assert ended == [[generation.request_id]]


async def test_every_answer_is_reserved_and_counts_as_waiting(serving: Serving, database: Database, clock: FakeClock) -> None:
    dora = await make_person(database, clock, "dora", Limits(tokens_per_minute=1000))
    generation = await serving.start(dora, [STALL, 5], n=3, max_tokens=100)
    state = serving.admission.snapshot(dora.principal).tokens

    assert state is not None
    assert state.remaining == 1000 - 2 - 3 * 100
    assert [serving.generations._open.has_room("tiny", dora.tenant.id, places) for places in (3, 4)] == [False, True]
    generation.end_early("disconnected")
    await generation.outcome


async def test_the_engine_gets_weight_class_and_deadline_of_the_tenant(
    serving: Serving, cast: Cast, database: Database, clock: FakeClock
) -> None:
    tenants = Tenants(database, clock)
    changed = await change_tenant(tenants, cast.bob, weight=4, tier="batch")
    generation = await serving.start(Person(tenant=changed, key=cast.bob.key, secret=""), TEXT)
    await generation.outcome
    (request,) = [request for frame in serving.engine.frames for request in frame.submit]

    assert (request.weight, request.priority, request.queue_deadline_s) == (4, Priority.BATCH, 7.5)


def test_the_engine_accepts_every_weight_and_tier_of_a_tenant() -> None:
    assert fields.WEIGHT_MAX == WEIGHT_MAX
    assert set(fields.TIERS) == set(Priority)


async def test_a_request_past_its_queue_deadline_gets_retry_after_and_is_not_billed(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [LATE, 5])
    outcome = await generation.outcome
    event = await serving.event(generation)

    assert isinstance(outcome.error, Overloaded)
    assert outcome.error.retry_after_s is not None
    assert (event.status, event.finish_reason, event.prompt_tokens) == ("voided", "deadline", 0)
    assert (event.cause, outcome.finish_reasons) == ("queue_deadline", ("deadline",))
    assert explain_live(generation.live).startswith("Ended before its first token (deadline) after ")


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_refused_by_an_overloaded_engine_gets_retry_after_and_is_not_billed(
    serving: Serving, cast: Cast, n: int
) -> None:
    generation = await serving.start(cast.bob, [BUSY, 5], n=n)
    outcome = await generation.outcome

    assert isinstance(outcome.error, Overloaded)
    assert (outcome.error.message, outcome.error.status) == ("512 grammars are already waiting", 503)
    assert outcome.error.retry_after_s is not None
    event = await serving.event(generation)
    assert (event.status, event.cause, outcome.finish_reason) == ("voided", "engine_overloaded", "refused")
    assert outcome.finish_reasons == ("refused",) * n


@pytest.mark.parametrize("n", [1, 3])
async def test_an_error_of_a_field_names_it_as_the_client_wrote_it(serving: Serving, cast: Cast, n: int) -> None:
    generation = await serving.start(cast.bob, [BLAME, 5], n=n, field_names={"guided_json": "response_format"})
    outcome = await generation.outcome

    assert isinstance(outcome.error, InvalidValue)
    assert (outcome.error.param, outcome.error.message) == ("response_format", "the schema is impossible")
    event = await serving.event(generation)
    assert (event.status, event.cause, outcome.finish_reason) == ("voided", "invalid_request", "refused")


async def test_a_live_request_sums_its_answers_and_shows_the_most_advanced_state(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [STALL, 5], n=2)
    live = generation.live
    rows = [
        RequestProgress(
            request_id=live.id, state=state, queue_position=place, kv_blocks=blocks, num_computed_tokens=1,
            num_output_tokens=0, num_preemptions=preemptions, index=index,
        )
        for index, (state, place, blocks, preemptions) in enumerate([("queued", 3, 0, 2), ("decode", None, 7, 1)])
    ]  # fmt: skip
    live.apply_progress(rows)

    assert (live.state, live.queue_position, live.kv_blocks, live.preemptions) == ("decode", None, 7, 3)
    live.apply_progress(rows[:1])
    assert (live.state, live.queue_position, live.kv_blocks, live.kv_blocks_max, live.preemptions) == ("queued", 3, 0, 7, 3)
    token_under_way = TokenEvent(
        request_id=live.id, token_ids=[7], num_output_tokens=1, num_prompt_tokens_computed=1, num_preemptions=1
    )
    live.apply_event(token_under_way, monotonic_s=live.admitted_monotonic_s)
    assert live.preemptions == 3, "the token was launched before its answer was preempted once more"
    generation.end_early("disconnected")
    await generation.outcome
