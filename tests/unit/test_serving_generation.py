"""A generation ends once, whatever happens: text for the reader, one settlement for the tenant, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import structlog

from appliance.base.db import Database
from appliance.base.errors import Draining, EngineUnavailable, InternalError, Overloaded, RateLimitExceeded
from appliance.metering.ledger.records import PendingEvent, Settlement, Usage
from appliance.metering.prices import Price
from appliance.serving import engine_client
from appliance.serving import generation as generation_module
from appliance.serving.answers import Answer
from appliance.serving.bill import Bill
from appliance.serving.chunks import Chunk
from appliance.serving.explanation import explain_live
from appliance.serving.generation import Generation
from appliance.serving.prepared_requests import PreparedRequest
from appliance.serving.tokenizer import ModelTokenizer
from appliance.tenancy.principals import Limits
from engine.protocol import FinishReason, GenerationRequest, SamplingParams, TokenEvent
from tests.support.cast import OWNER, Cast, make_person
from tests.support.clock import FakeClock
from tests.support.engine_messages import engine_status
from tests.support.fake_engine import FAIL, STALL, make_event
from tests.support.generations import Serving, open_serving, text_of
from tests.support.ledgers import num_running
from tests.support.polling import poll_until
from tests.support.received_events import sending
from tests.support.served_model import make_hollow_model

pytestmark = pytest.mark.on_either_database

TEXT = "the quick brown fox — é 漢"


async def test_text_usage_record_and_quota_agree(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT)
    text = await text_of(generation)
    outcome = await generation.outcome
    event = await serving.event(generation)

    assert text == TEXT
    assert (outcome.finish_reason, outcome.error) == ("length", None)
    assert event.status == "posted"
    assert event.completion_tokens == outcome.usage.completion_tokens == len(serving.ids(TEXT))
    assert event.prompt_tokens == len(serving.ids(TEXT))
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_the_record_is_settled_before_the_reader_gets_the_outcome(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT)
    await generation.outcome

    assert (await serving.event(generation)).status == "posted"


async def test_a_slow_settlement_does_not_delay_the_reader_and_is_awaited_at_the_end(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, disk = serving.ledger.settle, asyncio.Event()

    async def slowly(settlement: Settlement, on_recorded: Callable[[], object]) -> None:
        await disk.wait()
        await settle(settlement, on_recorded)

    monkeypatch.setattr(generation_module, "SETTLE_WAIT_S", 0.02)
    monkeypatch.setattr(serving.ledger, "settle", slowly)
    generation = await serving.start(cast.bob, TEXT)
    assert await text_of(generation) == TEXT
    assert (await generation.outcome).finish_reason == "length"
    assert (await serving.event(generation)).status == "pending"
    assert not await serving.generations.drain(0.02)
    disk.set()
    assert await serving.generations.drain(5.0)
    assert (await serving.event(generation)).status == "posted"
    assert 'gatehouse_requests_total{model="tiny",reason="length"} 1.0' in (await serving.metrics.render()).decode()


async def test_a_request_counts_for_the_day_of_its_reservation(
    serving: Serving, database: Database, cast: Cast, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, asked_at = serving.generations._prices.current, []

    async def slow(model: str, at: datetime, *, currency: str | None) -> Price | None:
        asked_at.append(at)
        clock.advance(len(asked_at) - 1)  # midnight passes before the price is looked up again
        return await current(model, at, currency=currency)

    monkeypatch.setattr(serving.generations._prices, "current", slow)
    clock.advance(12 * 3600 - 0.5)
    before = clock.now()
    dora = await make_person(database, clock, "dora", Limits(tokens_per_day=100))
    generation = await serving.start(dora, TEXT)
    await generation.outcome
    event = await serving.event(generation)
    (day,) = [hold.day for hold in generation._bill._reservation.holds if hold.allowance.limits.tokens_per_day]

    assert (event.admitted_at, asked_at) == (before, [before, before])
    assert event.billing_day == day.start == before.date() != clock.now().date()
    assert day.used == event.prompt_tokens + event.completion_tokens


async def test_a_stop_string_aborts_the_engine_and_bills_up_to_the_token_that_completed_it(
    serving: Serving, cast: Cast
) -> None:
    generation = await serving.start(cast.bob, TEXT, stop=["brown"], max_tokens=500)
    text = await text_of(generation)
    outcome = await generation.outcome
    expected = next(n for n in range(1, 99) if "brown" in serving.text(serving.ids(TEXT)[:n]))

    assert text == "the quick "
    assert outcome.finish_reason == "stop"
    assert outcome.usage.completion_tokens == generation.live.completion_tokens == expected
    assert (await serving.event(generation)).completion_tokens == expected


async def test_tokens_generated_past_a_stop_string_are_counted_as_discarded(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.client, "abort", lambda _request_id: None)  # an abort that comes too late
    generation = await serving.start(cast.bob, TEXT, stop=["quick"])
    outcome = await generation.outcome
    discarded = len(serving.ids(TEXT)) - outcome.usage.completion_tokens

    assert outcome.finish_reason == "stop"
    assert discarded > 0
    assert f'gatehouse_discarded_tokens_total{{model="tiny"}} {discarded}.0' in (await serving.metrics.render()).decode()
    assert f'generation_tokens_total{{model="tiny",tenant="bob"}} {outcome.usage.completion_tokens}.0' in (
        (await serving.metrics.render()).decode()
    )


async def test_timings_are_observed_once_per_request(
    serving: Serving, cast: Cast, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ttfts_s: list[float] = []
    monkeypatch.setattr(serving.client.stats, "note_ttft", ttfts_s.append)
    serving.engine.allow_steps(0)
    generation = await serving.start(cast.bob, TEXT)
    clock.advance(2.5)
    serving.engine.allow_steps(1000)
    await generation.outcome
    shown, count = (await serving.metrics.render()).decode(), len(serving.ids(TEXT))

    assert f'gatehouse_prompt_tokens_total{{model="tiny",tenant="bob"}} {count}.0' in shown
    assert 'gatehouse_requests_total{model="tiny",reason="length"} 1.0' in shown
    for name, times in (
        ("request_seconds", 1),
        ("queue_seconds", 1),
        ("time_to_first_token_seconds", 1),
        ("inter_token_latency_seconds", count - 1),
    ):
        assert f'gatehouse_{name}_count{{model="tiny"}} {times}.0' in shown
    for name in ("request_seconds", "time_to_first_token_seconds"):
        assert f'gatehouse_{name}_sum{{model="tiny"}} 2.5' in shown
    assert ttfts_s == [generation.live.ttft_s] == [2.5]
    assert generation.live.first_token_at == clock.now()
    assert generation.live.kv_blocks == 0


async def test_tokens_counted_but_not_recorded_show_up_when_a_request_has_ended(serving: Serving, cast: Cast) -> None:
    reconciliation = serving.model.engine.stats.reconciliation
    reconciliation.note_status(engine_status())
    generation = await serving.start(cast.bob, TEXT)
    await generation.outcome
    event = await serving.event(generation)
    for unrecorded in (0, 7):
        total = event.prompt_tokens + event.completion_tokens + unrecorded
        reconciliation.note_status(engine_status(generation_tokens_total=total))
        assert reconciliation.unexplained_tokens == unrecorded


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
async def test_an_answer_completed_by_the_engine_is_billed_with_its_finish_reason(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch, reason: FinishReason
) -> None:
    def events(request: GenerationRequest) -> list[TokenEvent]:
        return [make_event(request, request.prompt_token_ids, len(serving.ids(TEXT)), finish_reason=reason)]

    monkeypatch.setattr(serving.client, "submit", sending(events))
    generation = await serving.start(cast.bob, TEXT)
    outcome = await generation.outcome
    event = await serving.event(generation)

    assert await text_of(generation) == TEXT
    assert (outcome.finish_reason, outcome.finish_reasons, outcome.error) == (str(reason), (str(reason),), None)
    assert (event.status, event.finish_reason, event.cause) == ("posted", str(reason), None)
    assert event.completion_tokens == outcome.usage.completion_tokens == len(serving.ids(TEXT))


async def test_tokens_that_complete_no_character_are_emitted_with_the_one_that_does(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT)
    chunks: list[Chunk] = []
    while not generation.chunks.ended:
        chunks += await generation.chunks.take(10.0)

    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert all(chunk.text for chunk in chunks)
    assert len(chunks) < len(serving.ids(TEXT)), "some of its characters are several tokens"


async def test_tokens_after_a_stop_string_in_the_same_event_are_neither_shown_nor_billed(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events(request: GenerationRequest) -> list[TokenEvent]:
        all_at_once = make_event(request, ids, len(ids))
        return [all_at_once, make_event(request, [], len(ids), finish_reason=FinishReason.ABORTED)]

    ids = serving.ids(TEXT)
    monkeypatch.setattr(serving.client, "submit", sending(events))
    generation = await serving.start(cast.bob, TEXT, stop=["quick"])
    outcome = await generation.outcome
    expected = next(count for count in range(1, len(ids)) if "quick" in serving.text(ids[:count]))

    assert (outcome.finish_reason, outcome.usage.completion_tokens) == ("stop", expected)
    assert await text_of(generation) == "the "
    assert generation.live.completion_tokens == expected < len(ids)
    assert (await serving.event(generation)).completion_tokens == expected


async def test_every_token_has_a_logprob_even_if_it_is_part_of_a_character(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT, logprobs=0)
    shown: list[Chunk] = []
    while not generation.chunks.ended:
        shown += await generation.chunks.take(10.0)

    assert sum(len(chunk.logprobs) for chunk in shown) == len(serving.ids(TEXT))


@pytest.mark.parametrize("merged", [1, 3, 100])
def test_a_stop_string_ends_at_the_same_token_however_events_are_merged(tmp_path: Path, merged: int) -> None:
    tokenizer = ModelTokenizer.load(make_hollow_model(tmp_path / "model"))
    ids = tokenizer._tokenizer.encode(TEXT, add_special_tokens=False).ids
    request = GenerationRequest(request_id="r", tenant_id="t", prompt_token_ids=ids, sampling=SamplingParams(logprobs=0))
    answer = Answer(0, tokenizer, SamplingParams(stop=["quick"], logprobs=0))
    chunks: list[Chunk] = []
    for begin in range(0, len(ids), merged):
        part = ids[begin : begin + merged]
        chunks.append(answer.push(make_event(request, part, begin + len(part))))
        if answer.stopped:
            break
    expected = next(n for n in range(1, 99) if "quick" in tokenizer._tokenizer.decode(ids[:n]))

    assert "".join(chunk.text for chunk in chunks) == "the "
    assert chunks[-1].completion_tokens == expected
    assert sum(len(chunk.logprobs) for chunk in chunks) == expected - 1


@pytest.mark.parametrize(
    ("end", "stop_token_ids", "named"), [(0, [], 2), (5, [5], 2), (5, [], 3)], ids=["special", "stop", "text"]
)
def test_a_stop_token_that_is_not_shown_has_no_logprob(tmp_path: Path, end: int, stop_token_ids: list[int], named: int) -> None:
    tokenizer = ModelTokenizer.load(make_hollow_model(tmp_path / "model"))
    ids = [*tokenizer._tokenizer.encode("a b", add_special_tokens=False).ids[-2:], end]
    request = GenerationRequest(request_id="r", tenant_id="t", prompt_token_ids=ids, sampling=SamplingParams(logprobs=0))
    answer = Answer(0, tokenizer, SamplingParams(stop_token_ids=stop_token_ids, logprobs=0))
    chunk = answer.push(make_event(request, ids, len(ids), finish_reason=FinishReason.STOP))

    assert (chunk.completion_tokens, len(chunk.logprobs)) == (3, named)


def test_a_stop_string_in_held_back_text_ends_the_answer_too(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(make_hollow_model(tmp_path / "model"))
    ids = tokenizer._tokenizer.encode("the \N{PARROT}", add_special_tokens=False).ids[:-1]  # the last character lacks a byte
    request = GenerationRequest(request_id="r", tenant_id="t", prompt_token_ids=ids, sampling=SamplingParams())
    answer = Answer(0, tokenizer, SamplingParams(stop=[" \N{REPLACEMENT CHARACTER}"]))
    last = make_event(request, ids, len(ids), finish_reason=FinishReason.LENGTH)

    text = answer.push(last).text + answer.finish(last).text

    assert (text, answer.finish_reason) == ("the", "stop")


async def test_an_unanswered_abort_does_not_block_the_request(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_client, "FINAL_EVENT_WAIT_S", 0.01)
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id) as serving:
        monkeypatch.setattr(serving.engine, "_receive", serving.engine.frames.append)
        generation = await serving.start(cast.bob, [5, 6])
        generation.end_early("aborted")
        outcome = await generation.outcome

        assert (outcome.finish_reason, outcome.error and outcome.error.code) == ("aborted", "request_aborted")
        assert (await serving.event(generation)).status == "voided"


async def test_stop_strings_apply_only_after_min_tokens(serving: Serving, cast: Cast) -> None:
    count = len(serving.ids(TEXT))
    generation = await serving.start(cast.bob, TEXT, stop=["quick"], min_tokens=count, max_tokens=count)

    assert await text_of(generation) == TEXT


async def test_a_disconnect_ends_the_generation_and_bills_the_generated_tokens(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT, max_tokens=1000)
    await generation.chunks.take(10.0)
    generation.end_early("disconnected")
    generation.end_early("aborted")
    outcome = await generation.outcome
    event = await serving.event(generation)

    assert (outcome.finish_reason, outcome.error) == ("disconnected", None)
    assert (event.status, event.finish_reason) == ("posted", "disconnected")
    assert 1 <= event.completion_tokens < 1000


async def test_a_disconnect_whose_abort_comes_too_late_ends_as_the_engine_says(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving.client, "abort", lambda _request_id: None)  # an abort that comes too late
    generation = await serving.start(cast.bob, TEXT)
    await poll_until(lambda: generation._bill.submitted)
    generation.end_early("disconnected")
    outcome = await generation.outcome

    assert (outcome.finish_reason, outcome.finish_reasons) == ("length", ("length",))
    assert (await serving.event(generation)).finish_reason == "length"


async def test_no_timer_of_a_request_outlives_it(serving: Serving, cast: Cast, clock: FakeClock) -> None:
    generation = await serving.start(cast.bob, TEXT)
    generation.set_expiry(clock.now() + timedelta(hours=1))
    planned: list[asyncio.TimerHandle] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    ends = (generation.end_early, generation._expiry._on_expiry)
    await poll_until(lambda: len([timer for timer in planned if timer._callback in ends]) == 2)  # type: ignore[attr-defined]
    timers = [timer for timer in planned if timer._callback in ends]  # type: ignore[attr-defined]
    await generation.outcome
    await poll_until(lambda: not serving.generations._tasks)

    assert [timer.cancelled() for timer in timers] == [True, True]


async def test_a_disconnect_before_prefill_is_not_billed(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [STALL, 5, 6])
    generation.end_early("disconnected")
    await generation.outcome
    event = await serving.event(generation)

    assert (event.status, event.prompt_tokens, event.cost_picos) == ("voided", 0, 0)
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_an_administrator_can_abort_a_request(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT, max_tokens=1000)
    await generation.chunks.take(10.0)
    serving.generations.abort(generation.request_id, access=OWNER)
    outcome = await generation.outcome

    assert outcome.finish_reason == "aborted"
    assert outcome.error is not None
    assert outcome.error.code == "request_aborted"


async def test_a_request_ends_at_its_deadline(database: Database, clock: FakeClock, cast: Cast, tmp_path: Path) -> None:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id, deadline_s=0.05) as serving:
        generation = await serving.start(cast.bob, [STALL, 5])
        outcome = await generation.outcome

        assert outcome.finish_reason == "deadline"
        assert outcome.error is not None
        assert outcome.error.code == "deadline_exceeded"


async def test_an_error_of_the_engine_before_prefill_is_not_billed(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [FAIL, 5])
    outcome = await generation.outcome

    assert isinstance(outcome.error, InternalError)
    assert (await serving.event(generation)).status == "voided"


async def test_an_engine_that_dies_settles_what_was_counted(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT, max_tokens=1000)
    await generation.chunks.take(10.0)
    serving.engine_task.cancel()
    outcome = await generation.outcome
    event = await serving.event(generation)

    assert isinstance(outcome.error, EngineUnavailable)
    assert (event.status, event.finish_reason) == ("posted", "error")
    assert event.completion_tokens == outcome.usage.completion_tokens >= 1


async def test_a_slow_reader_gets_everything_in_fewer_chunks(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id, buffer_chunks=2) as serving:
        generation = await serving.start(cast.bob, TEXT)
        await generation.outcome
        pieces = await generation.chunks.take(1.0)

        assert len(pieces) == 2
        assert "".join(piece.text for piece in pieces) == TEXT


async def test_without_an_engine_nothing_is_reserved_or_recorded(serving: Serving, cast: Cast) -> None:
    serving.client.unavailable = "restarting"
    with pytest.raises(EngineUnavailable):
        await serving.start(cast.bob, TEXT)

    assert (await serving.reports.ledger_page(access=OWNER)).data == []


async def test_a_refusal_of_admission_leaves_no_record(serving: Serving, database: Database, clock: FakeClock) -> None:
    dora = await make_person(database, clock, "dora", Limits(concurrent_requests=1))
    first = await serving.start(dora, [STALL, 5])
    with pytest.raises(RateLimitExceeded):
        await serving.start(dora, TEXT)
    first.end_early("disconnected")
    await first.outcome

    assert len((await serving.reports.ledger_page(access=OWNER)).data) == 1


async def test_a_request_that_failed_in_the_engine_is_not_aborted_there(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [FAIL, 5])
    await generation.outcome
    await text_of(await serving.start(cast.bob, TEXT))

    assert [frame.abort for frame in serving.engine.frames if frame.abort] == []


@pytest.mark.parametrize(
    ("error", "log_events"),
    [(InternalError("nothing was started"), []), (ValueError("a bug"), ["pending record could not be written"])],
    ids=["refused", "bug"],
)
async def test_a_request_without_a_pending_record_never_reaches_the_engine(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch, error: Exception, log_events: list[str]
) -> None:
    async def broken(_entry: PendingEvent) -> None:
        raise error

    monkeypatch.setattr(serving.ledger, "open", broken)
    with structlog.testing.capture_logs() as logs:
        with pytest.raises(InternalError):
            await serving.start(cast.bob, TEXT)
        assert await serving.generations.drain(5.0)

    assert [line["event"] for line in logs] == log_events
    assert [frame for frame in serving.engine.frames if frame.submit] == []
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_a_disconnect_while_the_record_is_written_is_not_billed_and_never_reaches_the_engine(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = serving.ledger.open

    async def left(entry: PendingEvent) -> None:
        await written(entry)
        serving.generations.abort(entry.request_id, access=OWNER)

    monkeypatch.setattr(serving.ledger, "open", left)
    reconciliation = serving.model.engine.stats.reconciliation
    reconciliation.note_status(engine_status())
    with structlog.testing.capture_logs() as logs:
        generation = await serving.start(cast.bob, TEXT)
        await generation.outcome
        assert await serving.generations.drain(5.0)
    reconciliation.note_status(engine_status(generation_tokens_total=7))

    assert (logs, reconciliation.unexplained_tokens) == ([], 7)
    event = await serving.event(generation)
    assert (event.status, event.finish_reason, event.cause) == ("voided", "aborted", "administrator")
    assert [frame for frame in serving.engine.frames if frame.submit] == []
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_a_full_queue_refuses_before_admission(database: Database, clock: FakeClock, cast: Cast, tmp_path: Path) -> None:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id, max_waiting_requests=1, seats=1) as serving:
        for answers in ([1, 1], [2], [1, 1]):  # each answer takes a place and returns it
            generations = [await serving.start(cast.bob, [STALL, 5], n=num) for num in answers]
            assert [generation.live.tenant_open for generation in generations] == list(range(len(answers)))
            with pytest.raises(Overloaded):
                await serving.start(cast.bob, TEXT)
            for generation in generations:
                generation.end_early("disconnected")
            await poll_until(lambda: not serving.generations.live(access=OWNER))


async def test_a_tenant_that_fills_the_queue_leaves_places_to_the_others(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id, max_waiting_requests=3, seats=1) as serving:
        generations = []
        for person, most in (
            (cast.charlie, 4),
            (cast.bob, 2),
        ):  # one tenant alone may take all places; then 4 + 2 and 2 come to 8
            for _ in range(most):
                generations.append(await serving.start(person, [STALL, 5]))
            with pytest.raises(Overloaded):
                await serving.start(person, TEXT)
        for generation in generations:
            generation.end_early("disconnected")


async def test_while_the_ledger_cannot_be_written_new_requests_are_refused_at_once(serving: Serving, cast: Cast) -> None:
    serving.ledger.last_error = "disk full"
    with pytest.raises(Overloaded) as caught:
        await serving.start(cast.bob, TEXT)

    assert caught.value.retry_after_s is not None


async def test_draining_refuses_new_requests_and_waits_for_live_ones(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [STALL, 5])
    assert not await serving.generations.drain(0.01)
    with pytest.raises(Draining) as refused:
        await serving.start(cast.bob, TEXT)
    serving.generations.end_all()
    ended = (await generation.outcome).error

    assert await serving.generations.drain(5.0)
    assert isinstance(ended, Draining)
    assert ended.retry_after_s == refused.value.retry_after_s  # the same retry-after everywhere


async def test_a_live_request_shows_its_progress(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, [STALL, 5])
    live = serving.generations.live(access=OWNER)[generation.request_id]
    await poll_until(lambda: live.kv_blocks > 0)

    assert (live.state, live.queue_position, live.tenant_name) == ("queued", 0, "bob")
    assert "Waiting for a place" in explain_live(live)
    generation.end_early("aborted")
    await generation.outcome
    assert generation.live.state == "finished"


async def test_running_requests_with_output_are_checkpointed(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints: list[dict[str, Usage]] = []
    monkeypatch.setattr(serving.ledger, "checkpoint", checkpoints.append)
    await serving.generations.checkpoint()
    assert checkpoints == [], "nothing runs"

    waiting = await serving.start(cast.charlie, [STALL, 5])
    ended = await serving.start(cast.bob, TEXT)
    await ended.outcome
    running = [await serving.start(person, TEXT, max_tokens=1000) for person in (cast.bob, cast.charlie)]
    for generation in running:
        await generation.chunks.take(10.0)
    lives = [generation.live for generation in running]
    await serving.generations.checkpoint()
    assert checkpoints == [
        {
            live.id: Usage(
                prompt_tokens=live.prompt_tokens,
                cached_tokens=live.cached_tokens,
                completion_tokens=live.completion_tokens,
            )
            for live in lives
        }
    ]
    assert all(usage.completion_tokens > 0 for usage in checkpoints[0].values())
    for generation in (waiting, *running):
        generation.end_early("aborted")


async def test_ending_all_requests_refuses_new_ones(serving: Serving, cast: Cast) -> None:
    generations = [await serving.start(person, [STALL, 5]) for person in (cast.bob, cast.charlie, cast.bob)]
    serving.generations.end_all()
    with pytest.raises(Draining):
        await serving.start(cast.bob, TEXT)
    for generation in generations:
        assert (await generation.outcome).error is not None


async def test_requests_of_many_tenants_do_not_mix(serving: Serving, cast: Cast) -> None:
    texts = [f"the fox number {number} jumps" for number in range(8)]
    people = [cast.bob, cast.charlie] * 4
    running = [await serving.start(person, text) for person, text in zip(people, texts, strict=True)]

    assert [await text_of(generation) for generation in running] == texts
    for generation, person in zip(running, people, strict=True):
        await generation.outcome
        assert (await serving.event(generation)).tenant_id == person.tenant.id


@pytest.mark.parametrize(
    ("owner", "broken", "reason"), [(Bill, "_record", "error"), (Generation, "_observe_metrics", "disconnected")]
)
async def test_a_bug_in_the_settlement_is_reported_and_leaves_nothing_open(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch, owner: type[object], broken: str, reason: str
) -> None:
    generation = await serving.start(cast.bob, TEXT, max_tokens=1000)
    await generation.chunks.take(10.0)
    monkeypatch.setattr(owner, broken, None)
    generation.end_early("disconnected")
    with structlog.testing.capture_logs() as logs:
        outcome = await generation.outcome
        assert await serving.generations.drain(5.0)
    event = await serving.event(generation)

    assert (type(outcome.error), outcome.finish_reason) == (InternalError, "error")
    await generation.chunks.take(0.0)
    assert generation.chunks.ended, "a reader would wait for ever"
    assert [line["event"] for line in logs] == ["generation could not be settled"]  # no second settlement was attempted
    assert (event.status, event.finish_reason) == ("posted", reason)
    assert event.completion_tokens == generation.live.completion_tokens >= 1
    assert num_running(serving.admission, cast.bob.tenant.id) == 0
    assert "gatehouse_unrecorded_usage_tokens_total 0.0" in (await serving.metrics.render()).decode()


async def test_a_bug_in_the_gateway_aborts_the_request_and_bills_what_was_counted(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.engine.allow_steps(0)
    generation = await serving.start(cast.bob, TEXT, max_tokens=1000)
    monkeypatch.setattr(generation, "_emit_text", None)
    serving.engine.allow_steps(3)
    outcome = await generation.outcome

    assert isinstance(outcome.error, InternalError)
    event = await serving.event(generation)
    assert (event.status, event.finish_reason, event.cause) == ("posted", "error", "internal_error")
    assert 1 <= event.completion_tokens == outcome.usage.completion_tokens == generation.live.completion_tokens <= 3
    await poll_until(lambda: generation.request_id in [name for frame in serving.engine.frames for name in frame.abort])


async def test_a_bug_before_the_reservation_ends_releases_it(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Generation, "_settle", None)  # on the class, because the generation is created inside `start`
    generation = await serving.start(cast.bob, [STALL, 5])
    generation.end_early("disconnected")
    outcome = await generation.outcome
    assert await serving.generations.drain(5.0)

    assert isinstance(outcome.error, InternalError)
    live = generation.live
    assert (live.state, live.finish_reason, live.error) == ("finished", "error", outcome.error.message)
    event = await serving.event(generation)
    assert (event.status, event.finish_reason, event.cause) == ("voided", "error", "internal_error")
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_a_bug_before_there_is_a_record_settles_none(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bill, "open", None)
    with structlog.testing.capture_logs() as logs, pytest.raises(InternalError):
        await serving.start(cast.bob, TEXT)
    with structlog.testing.capture_logs() as later:
        assert await serving.generations.drain(5.0)

    assert [line["event"] for line in [*logs, *later]] == ["generation could not be settled"]
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_a_bug_before_the_generation_starts_releases_the_reservation(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreparedRequest, "live_request", None)
    with pytest.raises(TypeError):
        await serving.start(cast.bob, TEXT)
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


async def test_usage_that_even_the_last_attempt_cannot_record_is_counted_as_unrecorded(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = await serving.start(cast.bob, TEXT, max_tokens=1000)
    await generation.chunks.take(10.0)
    monkeypatch.setattr(serving.ledger, "settle", None)
    generation.end_early("disconnected")
    await generation.outcome
    assert await serving.generations.drain(5.0)

    assert "gatehouse_unrecorded_usage_tokens_total 0.0" not in (await serving.metrics.render()).decode()
    assert not serving.admission._loader._ended, "no read of the ledger waits for the record"
