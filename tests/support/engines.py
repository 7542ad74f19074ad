"""Engines for tests: over a model directory, and ways to run requests through one to their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from engine.build import build_engine
from engine.grammar.masks import GrammarMasks
from engine.grammar.queue import GrammarQueue
from engine.loop import Engine
from engine.options import EngineOptions
from engine.protocol import GenerationRequest, SamplingParams, TokenEvent
from engine.runner.model_runner import ModelRunner
from engine.runner.runner_choice import make_slot_runner
from engine.runner.slot_runner import SlotRunner
from engine.runner.slot_warm_up import warm_up
from engine.scheduling.limits import STEP_GUESSES_MAX
from engine.speculation.prompt_lookup import AdaptiveDrafter, SpeculationCosts
from engine.step_mode import StepMode

KV_CACHE_BYTES = 1_000_000
BATCHED_TOKENS = 256
PASS_S = 0.001


FREE_ROWS = SpeculationCosts(rows=(1, 64), times=(1.0, 1.0))


def unused_grammars() -> GrammarQueue:
    """For an engine that nobody asks for structured output."""
    return GrammarQueue(mock.Mock(), GrammarMasks(1))


def small_engine(model: Path, **changes: Any) -> Engine:
    """An engine on the CPU with the plain runner, one thread and a cache of a megabyte. Nothing is timed, which interpreted
    kernels take as long for as for a short answer; guesses go as deep as they may."""
    options_set = {"device": "cpu", "threads": 1, "kv_cache_bytes": KV_CACHE_BYTES, "max_num_seqs": 16, **changes}
    options_set.setdefault("enforce_eager", options_set["device"] == "cpu")
    if options_set["device"] == "cuda":  # whose largest step is computed at the start, here on a CPU
        options_set.setdefault("max_num_batched_tokens", BATCHED_TOKENS)
    options = EngineOptions(model=model, **options_set)
    with mock.patch("engine.runner.calibration._fastest_s", return_value=PASS_S):
        engine = build_engine(options)
    if options.speculative_config is not None:
        drafting = engine._scheduler._drafting
        assert drafting is not None
        drafting._drafter = AdaptiveDrafter(options.speculative_config, FREE_ROWS)
    return engine


def overlapped_engine(model: Path, **changes: Any) -> Engine:
    """As `small_engine`, with steps that are launched ahead over slots: all of what a GPU does but the graphs."""
    plain = small_engine(model, **changes)
    runner, scheduler = plain.runner, plain._scheduler
    assert isinstance(runner, ModelRunner)
    guesses = STEP_GUESSES_MAX if changes.get("speculative_config") else 0
    runner._guesses_are_equal = True
    slot_runner = make_slot_runner(runner, scheduler.limits, StepMode.AHEAD, max_guesses=guesses)
    warm_up(slot_runner.steps)
    return Engine(scheduler, slot_runner, plain.info, plain._grammars, step_budget=plain._step_budget)


def recorded_engine(model: Path, **changes: Any) -> Engine:
    """As `small_engine`, with the runner that serves on a CPU: over slots, decode steps as one call where that can be."""
    engine = small_engine(model, enforce_eager=False, **changes)
    assert isinstance(engine.runner, SlotRunner)
    return engine


def preempt_all(engine: Engine) -> None:
    """Take the blocks of everything that runs."""
    for request in list(engine._scheduler.running):
        engine._scheduler.preempt(request)


def evict_all(engine: Engine) -> None:
    """Drop the content of every block that nobody holds, to the host tier where there is one."""
    pool = engine._scheduler.pool
    pool.release(pool.allocate(pool.num_available))
    engine.runner.move(engine._scheduler.kv.take_moves())


def generation_request(
    request_id: str, prompt: Sequence[int], *, tenant_id: str = "alice", **sampling: Any
) -> GenerationRequest:
    """A request; greedy and without end-of-sequence unless `sampling` says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "seed": 1, "ignore_eos": True, **sampling})
    return GenerationRequest(request_id=request_id, tenant_id=tenant_id, prompt_token_ids=list(prompt), sampling=params)


def run_to_end(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, list[TokenEvent]]:
    """Submit all, step until idle; the events of each request. Invariants are checked after every step."""
    events: dict[str, list[TokenEvent]] = {}
    for request in requests:
        events[request.request_id] = engine.submit(request)
    while engine.has_requests:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
        engine.check_invariants()
    return events


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    """Output token ids of one request."""
    return [token_id for event in events for token_id in event.token_ids]
