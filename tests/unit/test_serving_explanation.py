"""One sentence explains where a request's time went, for live and past requests."""

from __future__ import annotations

import dataclasses

import pytest

from appliance.serving.engine_stats import RATE_WINDOW_S, EngineStats
from appliance.serving.explanation import Timeline, explain
from engine.protocol import EngineFrame, FinishReason, TokenEvent
from tests.support.engine_messages import engine_status

DONE = Timeline(
    queue_s=0.1, ttft_s=0.3, decode_s=2.0, prompt_tokens=50, cached_tokens=10, completion_tokens=40, preemptions=0,
    finish_reason="stop",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "Mostly generated: 2.0 s of 2.3 s for 40 tokens at 19.5 per second."),
        ({"queue_s": 5.0, "ttft_s": 5.2}, "Mostly waited for a place in the batch: 5.0 s of 7.2 s."),
        (
            {"queue_s": 5.0, "ttft_s": 5.2, "tenant_open": 12},
            "Mostly waited for a place in the batch: 5.0 s of 7.2 s; 12 requests of its own tenant came before it.",
        ),
        (
            {"ttft_s": None, "is_queued": True, "queue_position": 1, "finish_reason": None, "tenant_open": 1, "preemptions": 2},
            "Waiting for a place in the batch: one request of its own tenant ahead of it; "
            "preempted 2 times to make room for other requests.",
        ),
        (
            {"admission_wait_s": 5.0, "awaited_limit": "tenant_tokens_per_day"},
            "Mostly waited for room in its tenant's tokens per day: 5.0 s of 7.3 s.",
        ),
        (
            {"admission_wait_s": 5.0, "awaited_limit": "model_concurrency", "finish_reason": "aborted"},
            "Mostly waited for room in the model's concurrent requests: 5.0 s of 7.3 s; ended early (aborted).",
        ),
        ({"admission_wait_s": 5.0}, "Mostly waited for room in its limits: 5.0 s of 7.3 s."),
        ({"admission_wait_s": 1.0}, "Mostly generated: 2.0 s of 3.3 s for 40 tokens at 19.5 per second."),
        (
            {
                "admission_wait_s": 1.5,
                "awaited_limit": "key_requests",
                "ttft_s": None,
                "is_queued": True,
                "finish_reason": None,
            },
            "Waiting for a place in the batch; before that, 1.5 s of waiting for room in its key's requests per minute.",
        ),
        (
            {"admission_wait_s": 1.5, "awaited_limit": "key_requests", "ttft_s": None, "finish_reason": None},
            "Reading its prompt: 40 of 50 tokens to compute after 100 ms in the queue; "
            "before that, 1.5 s of waiting for room in its key's requests per minute.",
        ),
        (
            {"admission_wait_s": 1.5, "ttft_s": None, "finish_reason": "deadline", "queue_s": None, "completion_tokens": 0},
            "Ended before its first token (deadline); before that, 1.5 s of waiting for room in its limits.",
        ),
        (
            {"batch_size_mean": 63.6},
            "Mostly generated: 2.0 s of 2.3 s for 40 tokens at 19.5 per second in a batch of 64 on average.",
        ),
        ({"batch_size_mean": 1.9}, "Mostly generated: 2.0 s of 2.3 s for 40 tokens at 19.5 per second."),
        (
            {"after_s": 121.0, "finish_reason": "error"},
            "Mostly waited for its end after the last token: 121.0 s of 123.3 s; ended early (error).",
        ),
        ({"ttft_s": 4.1}, "Mostly read its prompt: 4.0 s of 6.1 s for 40 tokens not in the cache."),
        (
            {"ttft_s": 4.1, "prompt_tokens": 25_540},
            "Mostly read its prompt: 4.0 s of 6.1 s for 25,530 tokens not in the cache.",
        ),
        ({"ttft_s": 4.1, "prompt_tokens": 11}, "Mostly read its prompt: 4.0 s of 6.1 s for 1 token not in the cache."),
        ({"ttft_s": 0.15, "decode_s": 0.2}, "Quick: 350 ms in all."),
        ({"ttft_s": 0.15, "decode_s": 0.2, "finish_reason": "length"}, "Quick: 350 ms in all."),
        ({"ttft_s": 0.15, "decode_s": 0.2, "finish_reason": None}, "Quick: 350 ms so far."),
        ({"ttft_s": 0.15, "decode_s": 0.2, "finish_reason": "aborted"}, "Ended early, after 350 ms (aborted)."),
        (
            {"finish_reason": "disconnected"},
            "Mostly generated: 2.0 s of 2.3 s for 40 tokens at 19.5 per second; ended early (disconnected).",
        ),
        (
            {"ttft_s": None, "is_queued": True, "queue_position": 3, "finish_reason": None},
            "Waiting for a place in the batch: 3 requests of its own tenant ahead of it.",
        ),
        (
            {"ttft_s": None, "is_queued": True, "queue_position": 0, "finish_reason": None},
            "Waiting for a place in the batch: the next one of its tenant.",
        ),
        ({"ttft_s": None, "is_queued": True, "finish_reason": None}, "Waiting for a place in the batch."),
        (
            {"ttft_s": None, "is_queued": True, "finish_reason": None, "batch": True},
            "Waiting for a place in the batch; as batch work it lets more urgent requests go first.",
        ),
        (
            {"queue_s": 5.0, "ttft_s": 5.2, "batch": True},
            "Mostly waited for a place in the batch: 5.0 s of 7.2 s; as batch work it lets more urgent requests go first.",
        ),
        (
            {"ttft_s": None, "finish_reason": None},
            "Reading its prompt: 40 of 50 tokens to compute after 100 ms in the queue.",
        ),
        (
            {"ttft_s": None, "finish_reason": "disconnected", "queue_s": None, "completion_tokens": 0},
            "Ended before its first token (disconnected).",
        ),
        (
            {"ttft_s": None, "finish_reason": "error", "queue_s": None, "decode_s": None},
            "Ended after about 40 tokens (error); its times are not known.",
        ),
    ],
    ids=str,
)
def test_the_longest_stage_is_named(changes: dict[str, object], expected: str) -> None:
    assert explain(dataclasses.replace(DONE, **changes)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "words"), [(1, "preempted once"), (3, "preempted 3 times")])
def test_preemptions_are_explained(count: int, words: str) -> None:
    assert words in explain(dataclasses.replace(DONE, preemptions=count))


def test_the_rate_covers_the_last_window() -> None:
    stats = EngineStats()
    for second in range(10):
        stats.note_status(engine_status(generation_tokens_total=second * 50), float(second))

    assert stats.tokens_per_second(9.0) == 50.0
    assert stats.tokens_per_second(9.0 + 10 * RATE_WINDOW_S) == 0.0


def test_a_new_engine_process_counts_from_zero() -> None:
    stats = EngineStats()
    stats.note_status(engine_status(generation_tokens_total=1000), 0.0)
    stats.note_status(engine_status(generation_tokens_total=0), 1.0)
    stats.note_status(engine_status(generation_tokens_total=20), 2.0)

    assert stats.tokens_per_second(2.0) == 20.0


def test_probes_are_left_out_of_rates() -> None:
    stats = EngineStats()
    for second in range(4):
        stats.probe_id = f"probe_{second}"
        token = TokenEvent(f"probe_{second}", [7], 1, 1, finish_reason=FinishReason.LENGTH)
        events, others = [token, TokenEvent("req_1", [7], 1, 1)], [("req_2", 0, 8)]
        stats.note_tokens(EngineFrame(events=events, decoded=others))
        stats.note_status(engine_status(generation_tokens_total=2 * second + 2), float(second))

    assert stats.tokens_per_second(3.0) == 1.0
    assert stats.probe_prompt_tokens == 4


def test_quantiles_cover_recent_requests() -> None:
    stats = EngineStats()
    assert stats.ttft_quantile_s(0.5) is None
    for milliseconds in range(1, 101):
        stats.note_ttft(milliseconds / 1000)

    assert stats.ttft_quantile_s(0.5) == 0.051
    assert stats.ttft_quantile_s(0.95) == 0.096
