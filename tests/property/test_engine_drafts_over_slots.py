"""Engines with speculation over slots, by prompt lookup or a draft model, give the plain runner's tokens in any history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.loop import Engine
from engine.runner.slots import SlotWrites
from engine.sampling.columns import Kind
from engine.scheduling.request import table_of
from engine.scheduling.scheduled_batch import ScheduledRequest
from engine.speculation.options import SpeculativeOptions
from tests.support.engine_histories import (
    EngineLimits,
    PlannedRequest,
    assert_as_alone,
    engine_limits,
    planned_requests,
    repetitive_requests,
    run_history,
    with_grammars,
)
from tests.support.engines import generation_request, overlapped_engine, recorded_engine, run_to_end, small_engine, tokens
from tests.support.scheduling import make_request
from tests.support.scripted_drafter import WRONG_TOKEN, use_scripted_drafter
from tests.support.slots import make_batch, slot_state, slot_table
from tests.support.tiny_models import WIDE_HEADS, make_model, saved_first_layer, saved_model

FAMILIES = ("llama", "mistral-window", "gemma2")
LOOPS = {"launched ahead": overlapped_engine, "recorded": recorded_engine}
MakeEngine = Callable[..., Engine]


def prompt_lookup(num_tokens: int = 3, **options: Any) -> SpeculativeOptions:
    return SpeculativeOptions.parse({"method": "ngram", "num_speculative_tokens": num_tokens, **options})


def draft_model(model: Path, num_tokens: int = 3) -> SpeculativeOptions:
    return SpeculativeOptions(method="draft_model", model=model, num_speculative_tokens=num_tokens)


def model_of(family: str) -> Path:
    return saved_model(family, **WIDE_HEADS).directory


@pytest.fixture
def llama() -> Path:
    return model_of("llama")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    loop=st.sampled_from(sorted(LOOPS)),
    family=st.sampled_from(FAMILIES),
    requests=st.lists(repetitive_requests | planned_requests, min_size=1, max_size=7),
    depth=st.sampled_from((1, 3, 8)),
    room=engine_limits,
    preempt_at=st.none() | st.integers(1, 12),
)
def test_prompt_lookup_over_slots_gives_the_tokens_of_the_plain_runner(
    loop: str,
    family: str,
    requests: list[PlannedRequest],
    depth: int,
    room: EngineLimits,
    preempt_at: int | None,
) -> None:
    engine = LOOPS[loop](model_of(family), speculative_config=prompt_lookup(depth), **room.options)
    assert_as_alone(model_of(family), requests, run_history(with_grammars(engine), requests, preempt_at=preempt_at))
    assert engine.fallbacks.count == 0


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    loop=st.sampled_from(sorted(LOOPS)),
    family=st.sampled_from(FAMILIES),
    draft=st.none() | st.sampled_from(FAMILIES),
    requests=st.lists(repetitive_requests | planned_requests, min_size=1, max_size=7),
    depth=st.sampled_from((1, 3, 8)),
    room=engine_limits,
    preempt_at=st.none() | st.integers(1, 12),
)
def test_a_draft_model_over_slots_gives_the_tokens_of_the_plain_runner(
    loop: str,
    family: str,
    draft: str | None,
    requests: list[PlannedRequest],
    depth: int,
    room: EngineLimits,
    preempt_at: int | None,
) -> None:
    drafter = saved_first_layer(draft, **WIDE_HEADS) if draft else model_of(family)
    engine = LOOPS[loop](model_of(family), speculative_config=draft_model(drafter, depth), **room.options)
    assert_as_alone(model_of(family), requests, run_history(with_grammars(engine), requests, preempt_at=preempt_at))
    assert engine.fallbacks.count == 0


@pytest.mark.parametrize("loop", sorted(LOOPS))
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"logprobs": 2}], ids=str)
def test_all_drafts_are_accepted_if_target_and_draft_model_are_the_same(
    loop: str, sampling: dict[str, Any], llama: Path
) -> None:
    """The cache of the draft model must equal that of the target, also after chunks and steps without drafts."""
    engine = LOOPS[loop](llama, speculative_config=draft_model(llama, 4), max_num_batched_tokens=16)
    plain: Any = engine.runner.plain  # type: ignore[attr-defined]
    submitted = [
        generation_request(name, range(3, 3 + length), max_tokens=30, **sampling) for name, length in (("a", 4), ("b", 40))
    ]
    with mock.patch.object(plain, "run", side_effect=plain.run) as spy:
        run_to_end(engine, submitted)
    status = engine.status()
    assert spy.call_count == 0
    assert status.accepted_draft_tokens_total == status.draft_tokens_total > 30


def test_inputs_of_both_models_are_computed_before_the_layers_of_either(llama: Path) -> None:
    """A record keeps tensors created before the first layer and reuses the memory of later ones."""
    engine = recorded_engine(llama, speculative_config=draft_model(saved_first_layer("gemma2", **WIDE_HEADS)))
    steps: Any = engine.runner.steps  # type: ignore[attr-defined]
    calls = mock.Mock()
    for owner, method in ((steps.inputs, "forward_inputs"), *((decoder, "forward") for decoder in steps.decoders)):
        calls.attach_mock(mock.Mock(wraps=getattr(owner, method)), method)
        setattr(owner, method, getattr(calls, method))
    steps.decodes.step.record(Kind(weighs=True))
    assert [call[0] for call in calls.mock_calls] == ["forward_inputs", "forward_inputs", "forward", "forward"]


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_a_failing_draft_model_costs_one_fallback_step_and_no_token(loop: str, llama: Path) -> None:
    options: dict[str, Any] = {"temperature": 0.8, "max_tokens": 20}
    (plain,) = run_to_end(small_engine(llama), [generation_request("a", [5, 6, 7], **options)]).values()
    engine = LOOPS[loop](llama, speculative_config=draft_model(llama))
    drafts: Any = engine.runner.steps.draft_steps  # type: ignore[attr-defined]
    right, calls = drafts.propose, iter((None, None, RuntimeError("out of memory")))

    def fails_once(*values: Any) -> Any:
        if (error := next(calls, None)) is not None:
            raise error
        return right(*values)

    with mock.patch.object(drafts, "propose", fails_once):
        (events,) = run_to_end(engine, [generation_request("a", [5, 6, 7], **options)]).values()
    assert tokens(events) == tokens(plain)
    assert engine.fallbacks.count == 1
    status = engine.status()
    assert status.accepted_draft_tokens_total == status.draft_tokens_total, "its keys and values are right all the same"


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_drafts_are_verified_beside_prompt_chunks_and_rows_that_wait_for_masks(loop: str, llama: Path) -> None:
    engine = with_grammars(LOOPS[loop](llama, speculative_config=prompt_lookup(), max_num_batched_tokens=16))
    requests = [
        PlannedRequest((5, 6, 7) * 4, "greedy", 24, 1, 0, None),
        PlannedRequest(tuple(range(3, 40)), "guided", 8, 1, 2, None),
        PlannedRequest((9, 8), "penalised", 20, 1, 3, None),
        PlannedRequest((5, 6, 7) * 3, "scored", 20, 1, 4, None),
    ]
    plain: Any = engine.runner.plain  # type: ignore[attr-defined]
    with mock.patch.object(plain, "run", side_effect=plain.run) as spy:
        assert_as_alone(llama, requests, run_history(engine, requests, preempt_at=None))
    assert spy.call_count == 0
    assert engine.status().draft_tokens_total > 5  # how many are accepted depends on the processor's rounding


@pytest.mark.parametrize("loop", sorted(LOOPS))
@pytest.mark.parametrize("ends_by", ["by length", "by a token"])
def test_an_answer_ends_within_accepted_drafts_where_it_ends_without_drafts(loop: str, ends_by: str, llama: Path) -> None:
    engine = LOOPS[loop](llama, speculative_config=prompt_lookup(8))
    options: dict[str, Any] = {"temperature": 0.9, "max_tokens": 12}
    (plain,) = run_to_end(small_engine(llama), [generation_request("a", [5, 6, 7], **options)]).values()
    answer = tokens(plain)
    use_scripted_drafter(engine, answer, 8)
    for number in range(1, 12):
        stop: dict[str, Any] = {"max_tokens": number} if ends_by == "by length" else {"stop_token_ids": [answer[number - 1]]}
        (events,) = run_to_end(engine, [generation_request("a", [5, 6, 7], **{**options, **stop})]).values()
        expected = answer[:number] if ends_by == "by length" else answer[: answer.index(answer[number - 1]) + 1]
        assert tokens(events) == expected
    assert engine.status().accepted_draft_tokens_total > 30


@pytest.mark.parametrize("loop", sorted(LOOPS))
@pytest.mark.parametrize(("lost", "failing_call"), [("blocks", 1), ("blocks", 2), ("blocks", 3), ("parameters", 1)])
def test_slot_updates_lost_in_a_failed_step_are_sent_again(lost: str, failing_call: int, loop: str, llama: Path) -> None:
    """After a failed step that was computed on the slow path and is followed by a step with drafts."""
    options: dict[str, Any] = {"temperature": 0.8, "top_k": 5, "max_tokens": 20}
    (plain,) = run_to_end(small_engine(llama), [generation_request("a", [5, 6, 7], **options)]).values()
    engine = LOOPS[loop](llama, speculative_config=prompt_lookup(), block_size=4)
    run_to_end(engine, [generation_request("b", [8, 6, 7], max_tokens=3)])  # its slot is reused by request a
    use_scripted_drafter(engine, tokens(plain), 3)
    runner: Any = engine.runner
    owner, name = (runner.steps.state, "write") if lost == "blocks" else (runner._sampler, "assign")
    right, calls = getattr(owner, name), iter([None] * (failing_call - 1) + [RuntimeError("out of memory")])

    def fails_once(*values: Any) -> Any:
        error = next(calls, None)
        if error is not None:
            raise error
        return right(*values)

    with mock.patch.object(owner, name, fails_once):
        (events,) = run_to_end(engine, [generation_request("a", [5, 6, 7], **options)]).values()
    assert tokens(events) == tokens(plain)
    assert engine.fallbacks.count == 1, "what comes after it is over the slots again"


def test_a_step_has_no_more_drafts_than_rows(llama: Path) -> None:
    engine = recorded_engine(llama, speculative_config=prompt_lookup(32), max_num_seqs=4)
    use_scripted_drafter(engine, [7] * 40, 32)
    for name in "abcd":
        engine.submit(generation_request(name, [5, 6, 7], max_tokens=40))
    engine.step()
    batch = engine._scheduler.schedule()
    assert [item.num_draft_tokens for item in batch.decodes] == [32, 32, 0, 0]


def test_a_slot_is_sent_again_after_verification_even_if_all_drafts_were_accepted() -> None:
    """The step leaves the state of an arbitrary one of the request's rows in the slot."""
    state = slot_state(2, 4)
    table, request = slot_table(state), make_request("a", 5)
    request.block_table.extend([3, 1])
    (slot,) = table.update_for_verification([ScheduledRequest(request, 4, 3, True, 2, [8, 9])])
    state.last_tokens[slot], state.num_tokens[slot] = 99, 99
    request.token_ids += [8, 9, 6]
    assert table.update(make_batch([ScheduledRequest(request, 7, 1, True)])).tolist() == [slot]
    assert (int(state.last_tokens[slot]), int(state.num_tokens[slot])) == (6, 8)
    assert state.tables[slot].tolist() == [3, 1, 0, 0]


def test_lost_block_tables_are_sent_again_before_a_verification_step() -> None:
    """The request gets its old slot again; the table that was to be written there in the failed step is not there."""
    state = slot_state(2, 4)
    table, request = slot_table(state), make_request("a", 5)
    request.block_table.extend([3, 1])
    items = [ScheduledRequest(request, 4, 3, True, 2, [8, 9])]
    with mock.patch.object(state, "write", side_effect=RuntimeError), pytest.raises(RuntimeError):
        table.update_for_verification(items)
    table.clear()
    (slot,) = table.update_for_verification(items)
    assert state.tables[slot].tolist() == [3, 1, 0, 0]


def test_block_tables_sent_to_a_device_equal_those_written_by_the_host() -> None:
    pieces = SlotWrites(blocks=[(2, 0, table_of([7])), (0, 3, table_of([4, 1, 6])), (1, 5, table_of()), (3, 1, [9, 8])])
    sent, written = (slot_state(4, 6) for _ in range(2))
    sent.words.on_host = None  # as on a GPU
    for state in (sent, written):
        state.write(pieces)
    assert sent.tables.tolist() == written.tables.tolist() == [
        [0, 0, 0, 4, 1, 6], [0] * 6, [7, 0, 0, 0, 0, 0], [0, 9, 8, 0, 0, 0],
    ]  # fmt: skip


@pytest.mark.parametrize("make_engine", [small_engine, *LOOPS.values()])
def test_non_finite_keys_of_a_rejected_draft_end_no_request(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Non-finite values spoil sums even with weight zero, so such a draft costs a fallback step."""
    make_model("llama", tmp_path, **WIDE_HEADS)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][WRONG_TOKEN] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    options: dict[str, Any] = {"temperature": 0.8, "max_tokens": 12, "logit_bias": {WRONG_TOKEN: -100.0}}
    (plain,) = run_to_end(small_engine(tmp_path), [generation_request("a", [5, 6, 7], **options)]).values()
    engine = make_engine(tmp_path, speculative_config=prompt_lookup())
    use_scripted_drafter(engine, tokens(plain), 3)
    (events,) = run_to_end(engine, [generation_request("a", [5, 6, 7], **options)]).values()
    assert engine.status().draft_tokens_total > 3
    assert tokens(events) == tokens(plain)
