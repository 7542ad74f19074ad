"""The engine's loop with a fake runner: failing requests, validation, ends of requests, aborts, totals and progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engine.errors import EngineBroken
from engine.fault_isolation import run_isolated
from engine.loop import FAILED_STEPS_MAX
from engine.protocol import FinishReason
from engine.runner.model_runner import ModelRunner
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledRequest, StepOutput
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.fake_runner import EOS, MAX_MODEL_LEN, FakeRunner, engine_over
from tests.support.scheduling import make_request
from tests.support.tiny_models import make_model


def test_a_request_that_makes_a_step_raise_fails_alone() -> None:
    runner = FakeRunner()
    runner.culprits = {"bad"}
    engine = engine_over(runner)
    events = run_to_end(engine, [generation_request(name, [1, 2], max_tokens=3) for name in ("a", "bad", "b")])
    assert tokens(events["a"]) == tokens(events["b"]) == [5, 5, 5]
    assert [event.finish_reason for event in events["bad"]] == [FinishReason.ERROR]
    assert events["bad"][0].error == "the engine failed while computing this request: RuntimeError: boom"
    assert engine.status().kv_blocks_used == 0


def test_a_row_that_fails_with_drafts_is_computed_again_without_them_and_another_one_is_not() -> None:
    runner, computed = FakeRunner(), []

    def run(items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        computed.append([(item.request.request_id, item.start, item.num_tokens, item.samples) for item in items])
        is_failed = [bool(item.num_draft_tokens) or item.request.request_id == "bad" for item in items]
        return [StepOutput(error="boom") if failed else StepOutput([5]) for failed in is_failed]

    runner.run = run  # type: ignore[method-assign]
    drafting = ScheduledRequest(make_request("a", 4), 3, 3, True, num_draft_tokens=2, draft_token_ids=[7, 8])
    others = [ScheduledRequest(make_request(name, 4), 3, 1, True) for name in ("bad", "b")]
    assert run_isolated(runner, [drafting, *others]) == [StepOutput([5]), StepOutput(error="boom"), StepOutput([5])]
    assert computed == [[("a", 3, 3, True), ("bad", 3, 1, True), ("b", 3, 1, True)], [("a", 3, 1, True)]]


def test_a_failing_step_is_logged_with_its_answers_and_its_error_has_a_bounded_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = FakeRunner()
    runner.run = mock.Mock(side_effect=RuntimeError("boom" * 1000))  # type: ignore[method-assign]
    outputs = run_isolated(runner, [ScheduledRequest(make_request(name, 4), 3, 1, True) for name in "ab"])
    message = "the engine failed while computing this request: RuntimeError: " + "boom" * 1000
    assert [output.error for output in outputs] == [message[:500]] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"step failed stage=run request_ids={names}" for names in ("a/0,b/0", "a/0", "b/0")
    ]


@pytest.mark.parametrize("fault", ["broken", "unreliable"])
@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_an_engine_whose_steps_fail_for_all_requests_raises_engine_broken(fault: str, max_num_seqs: int) -> None:
    runner = FakeRunner()
    setattr(runner, fault, True)
    engine = engine_over(runner, max_num_seqs=max_num_seqs)
    with pytest.raises(EngineBroken):
        run_to_end(
            engine, [generation_request(str(i), [1], max_tokens=2) for i in range((FAILED_STEPS_MAX + 1) * max_num_seqs)]
        )


@pytest.mark.parametrize("num_bad", [1, 3])
def test_repeated_failures_of_bad_requests_do_not_break_the_engine(num_bad: int) -> None:
    runner = FakeRunner()
    runner.culprits = {f"bad {i}" for i in range(num_bad)}
    engine = engine_over(runner)
    for _ in range(5 * FAILED_STEPS_MAX):
        events = run_to_end(engine, [generation_request(name, [1, 2], max_tokens=3) for name in sorted(runner.culprits)])
        assert [event.finish_reason for each in events.values() for event in each] == [FinishReason.ERROR] * num_bad
    assert tokens(run_to_end(engine, [generation_request("good", [1], max_tokens=2)])["good"]) == [5, 5]
    assert engine.status().kv_blocks_used == 0


def test_a_failing_request_that_holds_every_block_does_not_break_the_engine() -> None:
    runner = FakeRunner()
    engine = engine_over(runner, max_num_batched_tokens=MAX_MODEL_LEN, num_blocks=MAX_MODEL_LEN // 4)
    runner.culprits = {"bad"}
    for _ in range(FAILED_STEPS_MAX + 1):
        run_to_end(engine, [generation_request("bad", [1] * (MAX_MODEL_LEN - 1), max_tokens=1)])
    assert not engine.has_requests


def test_without_a_free_block_for_the_probe_the_device_counts_as_working() -> None:
    runner = FakeRunner()
    engine = engine_over(runner, max_num_batched_tokens=MAX_MODEL_LEN, num_blocks=MAX_MODEL_LEN // 4)
    engine.submit(generation_request("a", [1] * (MAX_MODEL_LEN - 2), max_tokens=2))
    engine.step()
    runner.broken = True
    assert engine._is_device_working(), "the next step of the request that holds all blocks will tell"


def test_a_successful_step_resets_the_count_of_failed_steps() -> None:
    runner = FakeRunner()
    engine = engine_over(runner, max_num_seqs=1)
    for name in "abcdef":
        runner.broken = True
        run_to_end(engine, [generation_request(f"{name}{i}", [1], max_tokens=2) for i in range(FAILED_STEPS_MAX)])
        runner.broken = False
        events = run_to_end(engine, [generation_request(name, [1], max_tokens=2)])
        assert events[name][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * MAX_MODEL_LEN, {}, "the prompt has 64 tokens; at most 63 fit"),
        ([1, 10], {}, "prompt has token ids outside 0 … 9"),
        ([-1], {}, "prompt has token ids outside"),
        ([1], {"stop_token_ids": [10]}, "stop_token_ids has token ids outside"),
        ([1], {"logit_bias": {11: 1.0}}, "logit_bias has token ids outside"),
        ([1], {"seed": None}, "no seed"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_invalid_request_is_refused_on_submission(prompt: list[int], sampling: dict[str, Any], message: str) -> None:
    engine = engine_over(FakeRunner())
    (event,) = engine.submit(generation_request("a", prompt, **sampling))
    assert event.finish_reason is FinishReason.ERROR
    assert message in (event.error or "")
    assert not engine.has_requests


def test_retried_moves_do_not_repeat_those_that_succeeded() -> None:
    """Swapping out again would store the content that was swapped in meanwhile."""
    device, host = {5: "old"}, {1: "kept"}
    failures = [RuntimeError("the bus is busy")]

    def move(moves: BlockMoves) -> None:
        for source, target in moves.swap_out:
            host[target] = device[source]
        for source, target in moves.swap_in:
            device[target] = host[source]
        if moves.copies and failures:
            raise failures.pop()
        for source, target in moves.copies:
            device[target] = device[source]

    runner = FakeRunner()
    runner.move = move  # type: ignore[method-assign]
    engine_over(runner)._move(BlockMoves(swap_out=[(5, 0)], swap_in=[(1, 5)], copies=[(5, 6)]))
    assert (host, device) == ({0: "old", 1: "kept"}, {5: "kept", 6: "kept"})


def test_the_id_of_a_live_request_is_refused_and_that_of_a_finished_one_accepted() -> None:
    engine = engine_over(FakeRunner())
    run_to_end(engine, [generation_request("a", [1], max_tokens=1)])
    assert not engine.submit(generation_request("a", [1], max_tokens=1))
    (refused,) = engine.submit(generation_request("a", [1], max_tokens=1))
    assert "already live" in (refused.error or "")


@pytest.mark.parametrize(
    ("sampling", "expected_tokens", "reason"),
    [
        ({"ignore_eos": False, "max_tokens": 20}, [5, 5, 9], FinishReason.STOP),
        ({"ignore_eos": True, "max_tokens": 5}, [5, 5, 9, 5, 5], FinishReason.LENGTH),
        ({"ignore_eos": False, "max_tokens": 20, "stop_token_ids": [5]}, [5], FinishReason.STOP),
        ({"ignore_eos": False, "max_tokens": 20, "min_tokens": 4, "stop_token_ids": [5]}, [5, 5, 9, 5], FinishReason.STOP),
        ({"ignore_eos": True, "max_tokens": None}, 62, FinishReason.LENGTH),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_request_ends_by_stop_token_end_of_text_or_length(
    sampling: dict[str, Any], expected_tokens: list[int] | int, reason: FinishReason
) -> None:
    runner = FakeRunner()
    runner.token_of = lambda request_id, position: EOS if position == 4 else 5
    events = run_to_end(engine_over(runner), [generation_request("a", [1, 2], **sampling)])["a"]
    got = tokens(events)
    assert (len(got) if isinstance(expected_tokens, int) else got) == expected_tokens
    assert events[-1].finish_reason is reason
    assert sum(event.finish_reason is not None for event in events) == 1


def test_totals_count_each_prompt_once_and_all_generated_tokens_including_those_of_aborted_requests() -> None:
    engine = engine_over(FakeRunner())
    for name in ("a", "b"):
        engine.submit(generation_request(name, [1, 2, 3], max_tokens=10))
    for _ in range(4):
        engine.step()
    (event,) = engine.abort("a")
    assert (event.num_output_tokens, event.num_prompt_tokens_computed, event.token_ids) == (4, 3, [])
    run_to_end(engine, [])
    status = engine.status()
    assert (status.prompt_tokens_total, status.generation_tokens_total) == (6, 14)
    assert (status.num_running, status.num_waiting, status.kv_blocks_used, status.kv_blocks_free) == (0, 0, 0, 32)


def test_an_abort_frees_blocks_at_once_and_a_second_abort_returns_no_event() -> None:
    engine = engine_over(FakeRunner())
    engine.submit(generation_request("a", [1, 2, 3], max_tokens=10))
    engine.step()
    assert engine.status().kv_blocks_used == 1
    assert len(engine.abort("a")) == 1
    assert engine.status().kv_blocks_used == 0
    assert not engine.abort("a")


def test_status_reports_states_and_queue_positions_of_requests() -> None:
    engine = engine_over(FakeRunner(), max_num_seqs=2, max_num_batched_tokens=6)
    for name, length in (("decoding", 2), ("prefilling", 12), ("first", 3), ("second", 3)):
        engine.submit(generation_request(name, [1] * length, max_tokens=10))
    engine.step()
    rows = {row.request_id: row for row in engine.status(with_requests=True).requests or []}
    assert {name: row.state for name, row in rows.items()} == {
        "decoding": "decode", "prefilling": "prefill", "first": "queued", "second": "queued",
    }  # fmt: skip
    assert [rows[name].queue_position for name in ("decoding", "prefilling", "first", "second")] == [None, None, 0, 1]
    assert (rows["decoding"].num_output_tokens, rows["prefilling"].num_computed_tokens) == (1, 4)
    assert engine.status().requests is None


def test_queue_positions_count_requests_of_the_same_tenant_and_all_answers_of_a_request_as_one() -> None:
    engine = engine_over(FakeRunner(), max_num_seqs=1)
    for name, tenant, n in (("runs", "alice", 1), ("a", "alice", 3), ("b", "bob", 1), ("c", "alice", 1), ("d", "bob", 1)):
        engine.submit(generation_request(name, [1, 2], tenant_id=tenant, max_tokens=10, n=n))
    engine.step()
    status = engine.status(with_requests=True)
    positions = {(row.request_id, row.index): row.queue_position for row in status.requests or []}
    assert positions == {
        ("runs", 0): None, ("a", 0): 0, ("a", 1): 0, ("a", 2): 0, ("b", 0): 0, ("c", 0): 1, ("d", 0): 1,
    }  # fmt: skip
    waiting = {tenant.tenant_id: tenant.num_waiting for tenant in status.tenants or []}
    assert waiting == {"alice": 4, "bob": 2}
    assert status.num_waiting == 6


def test_the_probe_after_failed_steps_leaves_the_prefix_cache_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path)
    engine = small_engine(tmp_path)
    good = generation_request("good", list(range(1, 40)), max_tokens=4)
    before = tokens(run_to_end(engine, [good])["good"])
    run = ModelRunner.run
    probes: list[StepOutput] = []

    def run_unless_bad(runner: ModelRunner, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        if items[0].request.request_id == "bad":
            raise RuntimeError("boom")
        outputs = run(runner, items)
        probes.extend(output for item, output in zip(items, outputs, strict=True) if item.request.request_id == "probe")
        return outputs

    monkeypatch.setattr(ModelRunner, "run", run_unless_bad)
    for _ in range(FAILED_STEPS_MAX + 1):
        run_to_end(engine, [generation_request("bad", [1, 2], max_tokens=4)])
    assert [output.error for output in probes] == [None] * (FAILED_STEPS_MAX + 1)
    again = run_to_end(engine, [good])["good"]
    assert tokens(again) == before
    assert again[-1].num_cached_tokens == 32
