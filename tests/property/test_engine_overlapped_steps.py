"""Steps launched ahead or recorded give the tokens of the plain runner in random histories of requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import FinishReason, PlainReason
from engine.runner.scheduled_rows import EMPTY, FIRST_OUTPUT
from engine.runner.token_spans import TokenSpan
from engine.sampling.columns import Kind
from kernels import ops
from tests.support.engine_histories import (
    MAX_LEN,
    SAMPLING_OPTIONS,
    EngineLimits,
    PlannedRequest,
    assert_as_alone,
    engine_limits,
    planned_requests,
    run_history,
    with_grammars,
)
from tests.support.engines import generation_request, overlapped_engine, recorded_engine, run_to_end, small_engine, tokens
from tests.support.tiny_models import EOS, VOCAB_SIZE, WIDE_HEADS, saved_model

FAMILIES = ("llama", "mistral-window", "gemma2", "qwen3", "qwen3_moe")
CPU = torch.device("cpu")


@pytest.fixture
def llama() -> Path:
    return saved_model("llama").directory


def wide_model(family: str) -> Path:
    return saved_model(family, **WIDE_HEADS).directory


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(FAMILIES),
    requests=st.lists(planned_requests, min_size=1, max_size=9),
    room=engine_limits,
    preempt_at=st.none() | st.integers(1, 12),
)
def test_steps_launched_ahead_give_the_tokens_of_the_plain_runner(
    family: str,
    requests: list[PlannedRequest],
    room: EngineLimits,
    preempt_at: int | None,
) -> None:
    model = saved_model(family).directory
    engine = overlapped_engine(model, **room.options)
    assert_as_alone(model, requests, run_history(with_grammars(engine), requests, preempt_at=preempt_at))
    assert engine.fallbacks.count == 0, engine.fallbacks.reason


RECORDED = ("llama", "mistral-window", "gemma2", "qwen3_moe")
"""Models with heads that compiled attention supports. Steps of the last are not recorded: torch mixes its experts."""


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(RECORDED[:2]) | st.sampled_from(RECORDED),
    requests=st.lists(planned_requests, min_size=1, max_size=9),
    room=engine_limits,
    preempt_at=st.none() | st.integers(1, 12),
)
def test_recorded_steps_give_the_tokens_of_the_plain_runner(
    family: str,
    requests: list[PlannedRequest],
    room: EngineLimits,
    preempt_at: int | None,
) -> None:
    model = wide_model(family)
    engine = recorded_engine(model, **room.options)
    assert_as_alone(model, requests, run_history(with_grammars(engine), requests, preempt_at=preempt_at))
    assert engine.fallbacks.count == 0, engine.fallbacks.reason


@pytest.mark.parametrize("family", RECORDED)
def test_steps_are_recorded_unless_torch_computes_a_part_of_them(family: str) -> None:
    engine = recorded_engine(wide_model(family))
    records = engine.runner.steps.decodes.step._recorded  # type: ignore[attr-defined]
    for kind in (Kind(greedy=True), Kind(num_top=1), Kind(counts=True, num_top=20), None):
        assert (records.record(kind) is not None) == (family != "qwen3_moe")


def test_tokens_of_a_recorded_step_are_returned_by_the_same_step() -> None:
    engine = recorded_engine(wide_model("llama"))
    engine.submit(generation_request("a", [5, 6, 7], max_tokens=3))
    assert [[event.num_output_tokens for event in engine.step()] for _ in range(3)] == [[1], [2], [3]]
    assert not engine.has_requests


def test_masks_are_filled_before_a_recorded_step_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_grammars(recorded_engine(wide_model("llama")))
    runner: Any = engine.runner
    begin, compute = mock.Mock(wraps=runner._masks.begin), mock.Mock(wraps=runner.steps.decodes.step._recorded)
    calls = mock.Mock()
    calls.attach_mock(begin, "begin")
    calls.attach_mock(compute, "compute")
    monkeypatch.setattr(runner._masks, "begin", begin)
    monkeypatch.setattr(runner.steps.decodes.step, "_recorded", compute)
    engine.submit(generation_request("a", [5, 6, 7], max_tokens=3, guided_regex="[a-d]*"))
    run_to_end(engine, [])
    names = [call[0] for call in calls.mock_calls]
    assert names == ["begin", *["begin", "compute"] * 2], "the first step has a prompt and is no recorded one"


def test_a_stop_token_is_seen_one_step_late_and_surplus_tokens_are_discarded(llama: Path) -> None:
    engine = overlapped_engine(llama)
    for name, stops in (("a", []), ("b", list(range(VOCAB_SIZE)))):
        engine.submit(generation_request(name, [5, 6, 7], max_tokens=8, stop_token_ids=stops))
    events = [engine.step() for _ in range(3)]
    assert [len(each) for each in events] == [0, 2, 1], "a's first token, b's only one; then a's second"
    launched = engine._in_flight_step
    assert launched is not None
    assert len(launched.in_flight.requests) == 1, "nobody plans a request that has ended"
    ended = next(event for event in events[1] if event.request_id == "b")
    assert (ended.num_output_tokens, ended.finish_reason) == (1, FinishReason.STOP)
    assert ended.token_ids[0] in range(VOCAB_SIZE)
    assert EOS in range(VOCAB_SIZE)


def test_steps_with_prompts_use_the_workspaces_of_decode_steps() -> None:
    decoder = overlapped_engine(saved_model("gemma2").directory).runner.target  # type: ignore[attr-defined]
    decoder._ops = replace(decoder._ops, decode_workspace=lambda shape, rows, columns, *_: (shape, rows, columns))
    shapes = decoder.attention_shapes
    assert len(shapes) == 2, "a window and none"
    decoder._planners = [ops.PagedPlanner(shape, device=CPU) for shape in shapes]
    decoder.allocate_workspaces(16, 4)
    plans = decoder.prepare([TokenSpan([1], 4, [0], FIRST_OUTPUT), TokenSpan([1, 2, 3], 0, [1], EMPTY)]).attention
    assert [plan.workspace for plan in plans] == [(shape, 16, 4) for shape in shapes]


def test_no_step_is_launched_beyond_the_last_token_of_a_request(llama: Path) -> None:
    engine = overlapped_engine(llama)
    engine.submit(generation_request("a", [5, 6, 7], max_tokens=3))
    sizes = []
    while engine.has_requests:
        engine.step()
        sizes.append(0 if engine._in_flight_step is None else len(engine._in_flight_step.in_flight.requests))
    assert sizes == [1, 1, 1, 0]


@pytest.mark.parametrize("sampling", sorted(SAMPLING_OPTIONS))
def test_only_requests_without_a_slot_run_on_the_plain_runner(sampling: str, llama: Path) -> None:
    engine = with_grammars(overlapped_engine(llama, max_model_len=MAX_LEN))
    PlannedRequest((5, 6, 7, 8), sampling, 6, 1, 0, None).submit(engine, "a")
    engine.submit(generation_request("b", [9, 8, 7], max_tokens=6))
    plain = engine.runner.plain.run  # type: ignore[attr-defined]
    with mock.patch.object(engine.runner.plain, "run", side_effect=plain) as spy:  # type: ignore[attr-defined]
        run_to_end(engine, [])
    assert spy.call_count == int(sampling == "prompt scored")


def test_a_bias_row_is_reserved_for_a_request_whose_prompt_ran_on_the_plain_runner(llama: Path) -> None:
    """Its prompt had no slot, so its first decode step reserves the row of its bias."""
    options: dict[str, Any] = {"prompt_logprobs": 0, "logit_bias": {7: 9.0, 8: 8.5}, "max_tokens": 6}
    (plain,) = run_to_end(small_engine(llama), [generation_request("a", [5, 6, 7], **options)]).values()
    engine = overlapped_engine(llama)
    engine.submit(generation_request("b", [9, 8, 7], max_tokens=12))
    for _ in range(3):
        engine.step()
    found = run_to_end(engine, [generation_request("a", [5, 6, 7], **options)])
    assert tokens(found["a"]) == tokens(plain)
    assert engine.status().plain_steps_total[PlainReason.PROMPT_LOGPROBS] == 1
