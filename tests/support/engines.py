"""Engines over a model directory for tests, and helpers that run requests through them."""

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
from engine.runner.kernel_choices import KernelChoices
from engine.runner.model_runner import ModelRunner
from engine.runner.runner_choice import make_slot_runner
from engine.runner.slot_runner import SlotRunner
from engine.runner.slot_warm_up import warm_up
from engine.scheduling.limits import STEP_DRAFT_TOKENS_MAX
from engine.speculation.adaptive_drafter import AdaptiveDrafter, SpeculationCosts
from engine.step_mode import StepMode

KV_CACHE_BYTES = 1_000_000
BATCHED_TOKENS = 256
PASS_S = 0.001


FREE_ROWS = SpeculationCosts(rows=(1, 64), times=(1.0, 1.0))


def unused_grammars() -> GrammarQueue:
    """A grammar queue for an engine without structured output."""
    return GrammarQueue(mock.Mock(), GrammarMasks(1))


def small_engine(model: Path, **changes: Any) -> Engine:
    """A CPU engine with the plain runner, one thread and one megabyte of KV cache. Calibration is replaced by constants,
    because with interpreted kernels it takes as long as a short answer; drafts have the maximum depth."""
    options_set = {"device": "cpu", "threads": 1, "kv_cache_bytes": KV_CACHE_BYTES, "max_num_seqs": 16, **changes}
    options_set.setdefault("enforce_eager", options_set["device"] == "cpu")
    if options_set["device"] == "cuda":  # its largest step runs at the start, here on a CPU
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
    """`small_engine` with steps launched ahead over slots: as on a GPU, except for graphs."""
    plain = small_engine(model, **changes)
    runner, scheduler = plain.runner, plain._scheduler
    assert isinstance(runner, ModelRunner)
    max_draft_tokens = STEP_DRAFT_TOKENS_MAX if changes.get("speculative_config") else 0
    runner._accepts_by_equality = True
    slot_runner = make_slot_runner(runner, scheduler.limits, StepMode.AHEAD, max_draft_tokens=max_draft_tokens)
    warm_up(slot_runner.steps, KernelChoices(None))
    return Engine(scheduler, slot_runner, plain.info, plain._grammars)


def recorded_engine(model: Path, **changes: Any) -> Engine:
    """`small_engine` with the runner that serves on CPUs: over slots, with decode steps as one call where possible."""
    engine = small_engine(model, enforce_eager=False, **changes)
    assert isinstance(engine.runner, SlotRunner)
    return engine


def preempt_all(engine: Engine) -> None:
    """Preempt all running requests."""
    for request in list(engine._scheduler.running):
        engine._scheduler.preempt(request)


def evict_all(engine: Engine) -> None:
    """Evict the content of every free block, to the host tier if there is one."""
    pool = engine._scheduler.pool
    pool.release(pool.allocate(pool.num_available))
    engine.runner.move(engine._scheduler.kv.pop_moves())


def generation_request(
    request_id: str, prompt: Sequence[int], *, tenant_id: str = "alice", **sampling: Any
) -> GenerationRequest:
    """A request, by default greedy and ignoring end-of-sequence."""
    params = SamplingParams(**{"temperature": 0.0, "seed": 1, "ignore_eos": True, **sampling})
    return GenerationRequest(request_id=request_id, tenant_id=tenant_id, prompt_token_ids=list(prompt), sampling=params)


def run_to_end(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[str, list[TokenEvent]]:
    """Submit all requests and step until idle, checking invariants after every step. → events by request"""
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
