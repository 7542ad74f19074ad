"""A request is billed exactly what its engine counted, and nothing before its prompt was computed or a token generated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import structlog

from appliance.base.db import Database
from appliance.base.errors import RateLimitExceeded
from appliance.metering.ledger.records import Usage
from appliance.metering.past_requests import PastRequests
from appliance.tenancy.principals import Limits
from engine.protocol import FinishReason, GenerationRequest, TokenEvent
from tests.support.cast import OWNER, Cast, make_person
from tests.support.clock import FakeClock
from tests.support.factories import posted
from tests.support.fake_engine import STALL, make_event
from tests.support.generations import MODEL, InProcessEngine, Serving
from tests.support.ledgers import euro_prices, num_running
from tests.support.polling import poll_until
from tests.support.received_events import sending

pytestmark = pytest.mark.on_either_database

TEXT = "the quick brown fox"


def scripted(request: GenerationRequest, counts: Sequence[dict[str, int]], end: FinishReason) -> list[TokenEvent]:
    """Return events with the given `counts`, one event each; the last one of each answer is its final event."""
    events: list[TokenEvent] = []
    generated, answers = Counter[int](), [changes.get("index", 0) for changes in counts]
    for number, (index, changes) in enumerate(zip(answers, counts, strict=True)):
        output = changes.get("num_output_tokens", generated[index])
        event = make_event(request, [5] * (output - generated[index]), output)
        ended = index not in answers[number + 1 :]
        events.append(replace(event, **changes, finish_reason=end if ended else None))  # type: ignore[arg-type]
        generated[index] = output
    return events


@pytest.mark.parametrize(
    ("counts", "billed"),
    [
        ({"num_cached_tokens": 3}, 3),
        ({"num_cached_tokens": 3, "num_rejected_draft_tokens": 2}, 3),
        ({"num_cached_tokens": 10_000}, 4),  # no more of a prompt is cached than there is
    ],
    ids=["cached", "rejected", "too much"],
)
async def test_each_kind_of_token_has_its_price_and_the_limits_count_what_the_ledger_does(
    serving: Serving, cast: Cast, database: Database, clock: FakeClock, monkeypatch: pytest.MonkeyPatch,
    counts: dict[str, int], billed: int,
) -> None:  # fmt: skip
    await euro_prices(database, clock).add(
        model=MODEL, currency="EUR", prompt=1000, cached_prompt=100, completion=30_000, rejected_draft=7
    )
    script = [counts, {**counts, "num_output_tokens": 5}]
    monkeypatch.setattr(serving.client, "submit", sending(lambda request: scripted(request, script, FinishReason.LENGTH)))
    generation = await serving.start(cast.bob, [7, 7, 7, 7])
    outcome = await generation.outcome
    event, rejected = await serving.event(generation), counts.get("num_rejected_draft_tokens", 0)
    cost_picos = (4 - billed) * 1000 + billed * 100 + 5 * 30_000 + rejected * 7
    used = generation._bill._reservation.used

    assert outcome.usage == Usage(prompt_tokens=4, cached_tokens=billed, completion_tokens=5, rejected_tokens=rejected)
    assert (event.prompt_tokens, event.cached_tokens, event.completion_tokens) == (4, billed, 5)
    assert (event.rejected_tokens, event.cost_picos) == (rejected, cost_picos)
    assert (used.tokens, used.cost_picos) == (4 + 5, cost_picos)


@pytest.mark.parametrize(
    ("counts", "billed"),
    [
        ([(0, 0)], None),
        ([(3, 0)], None),
        ([(4, 0)], (4, 0)),
        ([(4, 0), (0, 0)], (4, 0)),
        ([(0, 1)], (4, 1)),
        ([(4, 1), (0, 1)], (4, 1)),
    ],
    ids=["nothing", "part of the prompt", "the prompt", "then preempted", "a token", "preempted behind it"],
)
async def test_an_aborted_request_is_billed_once_its_prompt_is_computed_or_a_token_generated(
    serving: Serving, cast: Cast, monkeypatch: pytest.MonkeyPatch, counts: list[tuple[int, int]], billed: tuple[int, int] | None
) -> None:
    script = [{"num_prompt_tokens_computed": computed, "num_output_tokens": output} for computed, output in counts]
    ttfts_s: list[float] = []
    monkeypatch.setattr(serving.client.stats, "note_ttft", ttfts_s.append)
    monkeypatch.setattr(serving.client, "submit", sending(lambda request: scripted(request, script, FinishReason.ABORTED)))
    generation = await serving.start(cast.bob, [7, 7, 7, 7])
    outcome = await generation.outcome
    event, used = await serving.event(generation), generation._bill._reservation.used

    assert event.status == ("voided" if billed is None else "posted")
    assert (event.prompt_tokens, event.completion_tokens) == (billed or (0, 0))
    assert outcome.usage.total_tokens == used.tokens == sum(billed or (0, 0))
    assert len(ttfts_s) == (outcome.usage.completion_tokens > 0), "without a token there is no time to the first"
    assert num_running(serving.admission, cast.bob.tenant.id) == 0


@pytest.mark.parametrize(
    ("prompt", "outputs", "reported_blocks", "blocks"),
    [
        (17, [0], 0, 2),
        (16, [1], 0, 1),  # the last token is in no block
        (16, [2], 0, 2),
        (20, [13], 0, 2),
        (20, [14], 0, 3),
        (20, [13, 30], 0, 1 + 1 + 3),  # the answers share the block that the prompt fills
        (20, [14], 7, 7),  # as reported by the engine meanwhile
    ],
)
async def test_a_past_request_shows_the_kv_blocks_of_its_tokens(
    serving: Serving, cast: Cast, database: Database, monkeypatch: pytest.MonkeyPatch,
    prompt: int, outputs: list[int], reported_blocks: int, blocks: int,
) -> None:  # fmt: skip
    script = [{"index": index, "num_output_tokens": output} for index, output in enumerate(outputs)]

    def events(request: GenerationRequest) -> list[TokenEvent]:
        serving.generations.live(access=OWNER)[request.request_id].kv_blocks_max = reported_blocks
        return scripted(request, script, FinishReason.LENGTH)

    monkeypatch.setattr(serving.client, "submit", sending(events))
    generation = await serving.start(cast.bob, [7] * prompt, n=len(outputs))
    await generation.outcome
    assert (await PastRequests(database).get(generation.request_id, access=OWNER)).kv_blocks == blocks


async def test_no_kv_blocks_are_shown_if_the_engine_is_gone_or_computed_nothing(
    serving: Serving, cast: Cast, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = [{"num_prompt_tokens_computed": 0}]
    monkeypatch.setattr(serving.client, "submit", sending(lambda request: scripted(request, script, FinishReason.ABORTED)))
    refused = await serving.start(cast.bob, [7] * 20)
    await refused.outcome
    monkeypatch.setattr(InProcessEngine, "info", None)
    script[0]["num_prompt_tokens_computed"] = 20
    served = await serving.start(cast.bob, [7] * 20)
    await served.outcome
    assert [(await serving.event(generation)).cause for generation in (refused, served)] == ["engine_ended"] * 2
    for generation in (refused, served):
        assert (await PastRequests(database).get(generation.request_id, access=OWNER)).kv_blocks == 0


async def test_an_unbilled_request_uses_up_no_limit(serving: Serving, database: Database, clock: FakeClock) -> None:
    dora = await make_person(database, clock, "dora", Limits(requests_per_minute=1, tokens_per_day=1000))
    left = await serving.start(dora, [STALL, 5])
    left.end_early("disconnected")
    await left.outcome
    served = await serving.start(dora, TEXT)
    await served.outcome
    assert [(await serving.event(generation)).status for generation in (left, served)] == ["voided", "posted"]
    with pytest.raises(RateLimitExceeded):
        await serving.start(dora, TEXT)


async def test_a_settlement_that_the_ledger_refuses_is_counted_once_as_unrecorded(serving: Serving, cast: Cast) -> None:
    generation = await serving.start(cast.bob, TEXT, max_tokens=1000)
    await generation.chunks.take(10.0)
    await serving.ledger.settle(posted(generation.request_id, completion=1, prompt=1))  # a bug: somebody else settles it
    generation.end_early("disconnected")
    with structlog.testing.capture_logs() as logs:
        outcome = await generation.outcome
        await poll_until(lambda: not serving.generations.live(access=OWNER))

    assert [line["event"] for line in logs] == ["usage record was refused"]
    assert serving.ledger.unrecorded_usage_tokens == outcome.usage.total_tokens > 0
    assert "gatehouse_unrecorded_usage_tokens_total 0.0" in (await serving.metrics.render()).decode(), (
        "the ledger has counted it"
    )
