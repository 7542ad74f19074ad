"""Faults injected into each stage of a step end only the request at fault, with an error that names the stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import EngineBroken
from engine.grammar.masks import GrammarMasks
from engine.grammar.spec import GrammarError
from engine.layers.forward_inputs import ForwardInputs
from engine.loop import Engine
from engine.protocol import FinishReason, TokenEvent
from engine.runner.chunk_step import ChunkRows, ChunkStep
from engine.runner.draft_model import DraftModel
from engine.runner.kv_cache import BlockMover
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.slot_runner import SlotRunner
from engine.runner.token_spans import TokenSpan
from engine.sampling.columns import ColumnSampler, SampledColumns
from engine.sampling.sampler import NOT_FINITE, SampledToken, Sampler
from engine.scheduling.scheduled_batch import BlockMoves, ScheduledRequest, StepOutput
from engine.speculation.options import SpeculativeOptions
from kernels.ops import Words
from tests.support.engines import (
    evict_all,
    generation_request,
    overlapped_engine,
    preempt_all,
    run_to_end,
    small_engine,
    tokens,
)
from tests.support.tiny_models import saved_model

BAD = "bad"
BAD_PROMPT = [99, 98, 97]
NEIGHBOURS = {"a": [5, 6, 7], "b": list(range(3, 40)), "c": [8] * 17, "d": [4]}
MAX_TOKENS = 8

both_loops = pytest.mark.parametrize("make_engine", [small_engine, overlapped_engine], ids=["plain", "overlapped"])
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def model() -> Path:
    return saved_model("llama").directory


@pytest.fixture(scope="module")
def undisturbed_tokens(model: Path) -> dict[str, list[int]]:
    """The tokens of the neighbours without a bad request."""
    events = run_to_end(
        small_engine(model), [generation_request(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in NEIGHBOURS.items()]
    )
    return {name: tokens(events[name]) for name in NEIGHBOURS}


def run_with_bad_request(engine: Engine, **sampling: Any) -> dict[str, list[TokenEvent]]:
    names = [*NEIGHBOURS]
    requests = [generation_request(name, NEIGHBOURS[name], max_tokens=MAX_TOKENS) for name in names]
    requests.insert(2, generation_request(BAD, BAD_PROMPT, **{"max_tokens": MAX_TOKENS, **sampling}))
    return run_to_end(engine, requests)


def assert_only_bad_request_failed(
    events: dict[str, list[TokenEvent]], undisturbed_tokens: dict[str, list[int]], message: str
) -> None:
    assert {name: tokens(events[name]) for name in NEIGHBOURS} == undisturbed_tokens
    last = events[BAD][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert message in (last.error or "")
    assert sum(event.finish_reason is not None for event in events[BAD]) == 1


def is_bad(rows: Sequence[TokenSpan]) -> bool:
    return any(99 in row.token_ids for row in rows)


def raising_if(original: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    """`original`, which raises ValueError instead if `when(*arguments)`."""

    def call(*arguments: Any, **named: Any) -> Any:
        if when(*arguments, **named):
            raise ValueError("a fault was put here")
        return original(*arguments, **named)

    return call


@both_loops
def test_a_request_whose_inputs_cannot_be_prepared_ends_alone(
    make_engine: MakeEngine, model: Path, undisturbed_tokens: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_bad(_: ChunkStep, rows: ChunkRows, *__: Any) -> bool:
        return is_bad(rows.chunks)

    monkeypatch.setattr(PagedDecoder, "prepare", raising_if(PagedDecoder.prepare, lambda self, rows: is_bad(rows)))
    monkeypatch.setattr(ChunkStep, "write", raising_if(ChunkStep.write, has_bad))
    events = run_with_bad_request(make_engine(model))
    assert_only_bad_request_failed(
        events, undisturbed_tokens, "failed while preparing this request for the device: ValueError: a fault"
    )


@both_loops
def test_a_request_whose_forward_pass_fails_ends_alone(
    make_engine: MakeEngine, model: Path, undisturbed_tokens: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def holds_bad(_: PagedDecoder, inputs: ForwardInputs) -> bool:
        return bool((inputs.token_ids == 99).any())

    monkeypatch.setattr(PagedDecoder, "forward", raising_if(PagedDecoder.forward, holds_bad))
    events = run_with_bad_request(make_engine(model))
    assert_only_bad_request_failed(events, undisturbed_tokens, "failed while computing this request: ValueError: a fault")


@both_loops
@pytest.mark.parametrize("position", [3, 6])
def test_a_request_whose_sampling_fails_ends_alone_and_keeps_its_tokens(
    position: int,
    make_engine: MakeEngine,
    model: Path,
    undisturbed_tokens: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reaches(_: Sampler, logits: torch.Tensor, rows: Sequence[Any], masks: Any = None) -> bool:
        return any(row.request.request_id == BAD and row.position == position for row in rows)

    def may_reach(_: ColumnSampler, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, *more: Any) -> bool:
        return position in positions.tolist()

    monkeypatch.setattr(Sampler, "sample", raising_if(Sampler.sample, reaches))
    monkeypatch.setattr(ColumnSampler, "choose", raising_if(ColumnSampler.choose, may_reach))
    events = run_with_bad_request(make_engine(model))
    assert_only_bad_request_failed(
        events, undisturbed_tokens, "failed while choosing the next token of this request: ValueError: a fault"
    )
    assert events[BAD][-1].num_output_tokens == len(tokens(events[BAD])) == position - len(BAD_PROMPT)


@both_loops
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_logits_end_their_own_request(
    poison: float,
    make_engine: MakeEngine,
    model: Path,
    undisturbed_tokens: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sample = Sampler.sample
    calls = 0

    def poisoned(self: Sampler, logits: torch.Tensor, rows: Sequence[Any], masks: Any = None) -> list[SampledToken]:
        nonlocal calls
        calls += 1
        for index, row in enumerate(rows):
            if row.request.request_id == BAD and row.position == 5:
                logits[index, 17] = poison
        return sample(self, logits, rows, masks)

    assign, choose, bad_slots = ColumnSampler.assign, ColumnSampler.choose, list[int]()

    def recording_assign(self: ColumnSampler, slots: Sequence[int], requests: Sequence[Any]) -> Words:
        bad_slots.extend(slot for slot, request in zip(slots, requests, strict=True) if request.request_id == BAD)
        return assign(self, slots, requests)

    def poisoned_in_slots(
        self: ColumnSampler, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, *more: Any, **named: Any
    ) -> SampledColumns:
        logits[[i for i, slot in enumerate(slots.tolist()) if slot in bad_slots and positions[i] == 5], 17] = poison
        return choose(self, logits, slots, positions, *more, **named)

    monkeypatch.setattr(Sampler, "sample", poisoned)
    monkeypatch.setattr(ColumnSampler, "assign", recording_assign)
    monkeypatch.setattr(ColumnSampler, "choose", poisoned_in_slots)
    engine = make_engine(model)
    events = run_with_bad_request(engine)
    assert_only_bad_request_failed(events, undisturbed_tokens, NOT_FINITE)
    # A plain step is not repeated; of a launched one only the row without a token is, to find the reason.
    assert calls == (engine.status().steps_total if make_engine is small_engine else 1)


@both_loops
def test_non_finite_cache_content_does_not_reach_the_next_owner_of_a_block(
    make_engine: MakeEngine, model: Path, undisturbed_tokens: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, num_kv_blocks=16, max_model_len=64)
    runner = engine.runner
    assert isinstance(runner, ModelRunner | SlotRunner)
    for cache in runner.target.kv_caches:
        cache.fill_(float("nan"))
    events = run_to_end(
        engine, [generation_request(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in NEIGHBOURS.items()]
    )
    assert {name: tokens(events[name]) for name in NEIGHBOURS} == undisturbed_tokens


def test_the_request_at_fault_is_found_by_halving_and_the_next_step_is_whole(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    run = ModelRunner.run

    def counted(self: ModelRunner, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        sizes.append(len(items))
        if any(item.request.request_id == BAD for item in items):
            raise RuntimeError("boom")
        return run(self, items)

    monkeypatch.setattr(ModelRunner, "run", counted)
    engine = small_engine(model)
    requests = [generation_request(str(i), [3 + i], max_tokens=3) for i in range(15)]
    events = run_to_end(engine, [*requests[:9], generation_request(BAD, BAD_PROMPT), *requests[9:]])
    assert all(len(tokens(events[str(i)])) == 3 for i in range(15))
    assert len(sizes) - 2 <= 2 * 4 + 1, "sixteen requests are halved four times"
    assert sizes[-2:] == [15, 15]


@pytest.mark.parametrize("fails", ["to draft", "to read"])
def test_a_draft_model_that_fails_to_draft_ends_no_request_and_one_that_fails_to_prefill_ends_one(
    model: Path, undisturbed_tokens: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def is_bad(_: DraftModel, items: Sequence[ScheduledRequest]) -> bool:
        return any(item.request.request_id == BAD and (item.num_draft_tokens or fails == "to read") for item in items)

    monkeypatch.setattr(DraftModel, "propose", raising_if(DraftModel.propose, is_bad))
    config = SpeculativeOptions(method="draft_model", model=model, num_speculative_tokens=2)
    events = run_with_bad_request(small_engine(model, speculative_config=config))
    if fails == "to read":
        assert_only_bad_request_failed(
            events, undisturbed_tokens, "failed while drafting tokens for this request: ValueError: a fault"
        )
    else:
        assert {name: tokens(events[name]) for name in undisturbed_tokens} == undisturbed_tokens
        assert all(event.error is None for event in events[BAD])


def test_block_moves_that_fail_once_are_retried(
    model: Path, undisturbed_tokens: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    move = BlockMover.move
    attempts: list[bool] = []

    def fails_every_other_time(self: BlockMover, moves: BlockMoves) -> None:
        attempts.append(bool(moves))
        move(self, moves)
        if len(attempts) % 2:
            raise RuntimeError("the bus is busy")

    engine = small_engine(model, swap_space=0.002, num_kv_blocks=24, max_model_len=64)
    requests = [generation_request(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in NEIGHBOURS.items()]
    events: dict[str, list[TokenEvent]] = {request.request_id: engine.submit(request) for request in requests}
    for _ in range(3):
        for event in engine.step():
            events[event.request_id].append(event)
    preempt_all(engine)
    evict_all(engine)
    monkeypatch.setattr(BlockMover, "move", fails_every_other_time)
    for name, rest in run_to_end(engine, []).items():
        events[name] += rest
    assert len(attempts) >= 2
    assert {name: tokens(events[name]) for name in NEIGHBOURS} == undisturbed_tokens
    assert engine.status().swapped_in_blocks_total > 0


def test_block_moves_that_fail_twice_raise_engine_broken(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: BlockMover, moves: BlockMoves) -> None:
        raise RuntimeError("the bus is gone")

    monkeypatch.setattr(BlockMover, "move", broken)
    engine = small_engine(model)
    engine.submit(generation_request("a", [5] * 7, max_tokens=4, n=2))
    with pytest.raises(EngineBroken, match="blocks cannot be moved: RuntimeError: the bus is gone"):
        run_until_idle(engine)


def test_a_grammar_that_cannot_accept_a_token_ends_its_own_answer(
    model: Path, undisturbed_tokens: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses_bad(self: GrammarMasks, request: Any, token_ids: Sequence[int]) -> GrammarError | None:
        return GrammarError("guided_regex", "the grammar is lost") if request.request_id == BAD else None

    monkeypatch.setattr(GrammarMasks, "accept", refuses_bad)
    monkeypatch.setattr(GrammarMasks, "are_empty", False)
    monkeypatch.setattr(type(generation_request("x", [1]).sampling), "is_guided", True)
    events = run_with_bad_request(small_engine(model))
    assert_only_bad_request_failed(events, undisturbed_tokens, "the grammar is lost")
    assert events[BAD][-1].error_param == "guided_regex"


def test_an_idle_engine_that_lost_a_block_raises_engine_broken_at_its_check(model: Path) -> None:
    engine = small_engine(model)
    run_to_end(engine, [generation_request("a", [5, 6, 7], max_tokens=2)])
    engine.check_when_idle()
    engine._scheduler.pool.allocate(1)
    engine.check_when_idle()
    engine.submit(generation_request("b", [5, 6, 7], max_tokens=2))
    run_until_idle(engine)
    with pytest.raises(EngineBroken, match="the idle engine is not in order"):
        engine.check_when_idle()


def run_until_idle(engine: Engine) -> None:
    """Step until idle, without the checks of `run_to_end`."""
    while engine.has_requests:
        engine.step()
