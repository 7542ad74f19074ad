"""Greedy tokens equal transformers' under swapping, recomputation, speculation and shared prompts, for each kind of family."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.loop import Engine
from engine.protocol import TokenEvent
from engine.speculation.options import SpeculativeOptions
from tests.support.engines import evict_all, generation_request, preempt_all, run_to_end, small_engine, tokens
from tests.support.parity import assert_greedy
from tests.support.tiny_models import VOCAB_SIZE, saved_model

PROMPT_LENS = (5, 17, 40)
MAX_TOKENS = 16
FAMILIES = (
    "llama", "llama-dynamic-rope", "qwen2-window", "gemma2", "gemma3_text", "phi3-longrope", "mixtral-window", "qwen3_moe",
)  # fmt: skip
"""One family for each way of reading the context: whole or windowed, rotated by length or not, one or two kinds of layers, each
mixture of experts. test_engine_parity_families covers all other differences."""
SWAP_SPACE_GIB = 0.002
SMALL: dict[str, Any] = {"num_kv_blocks": 24, "max_model_len": 128, "max_num_batched_tokens": 48}


def engine_of(family: str, **options: Any) -> Engine:
    return small_engine(saved_model(family).directory, **{**SMALL, **options})


def check(family: str, engine: Engine, interrupt: Callable[[Engine], None] | None = None, **sampling: Any) -> None:
    """Run repetitive prompts in one batch, with `interrupt` called twice, and compare tokens with transformers'."""
    prompts = make_prompts()
    events: list[TokenEvent] = []
    for index, prompt in enumerate(prompts):
        assert not engine.submit(generation_request(str(index), prompt, max_tokens=MAX_TOKENS, logprobs=0, **sampling))
    if interrupt is not None:
        for _ in range(2):
            events += [event for _ in range(5) for event in engine.step()]
            assert engine.status().num_running == len(prompts), "the interruption comes too late"
            interrupt(engine)
    events += [event for of_one in run_to_end(engine, []).values() for event in of_one]
    num_answers = sampling.get("n", 1)
    answers = [[e for e in events if (e.request_id, e.index) == (str(i), k)] for i, k in answer_keys(len(prompts), num_answers)]
    assert_greedy(saved_model(family).reference, [prompt for prompt in prompts for _ in range(num_answers)], answers)
    assert all(len(tokens(answer)) == MAX_TOKENS for answer in answers)


def answer_keys(num_prompts: int, num_answers: int) -> list[tuple[int, int]]:
    return [(i, k) for i in range(num_prompts) for k in range(num_answers)]


def make_prompts() -> list[list[int]]:
    """Prompts of two equal halves, so that prompt lookup finds drafts."""
    rng = random.Random(4)
    parts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENS]
    return [part + part for part in parts]


families = pytest.mark.parametrize("family", FAMILIES)


def preempt_and_evict(engine: Engine) -> None:
    preempt_all(engine)
    evict_all(engine)


@families
def test_swapped_requests_equal_transformers(family: str) -> None:
    engine = engine_of(family, swap_space=SWAP_SPACE_GIB)
    check(family, engine, preempt_and_evict)
    status = engine.status()
    assert status.swapped_in_blocks_total >= 10
    assert status.preemptions_total >= 6


@families
def test_recomputed_requests_equal_transformers(family: str) -> None:
    engine = engine_of(family)
    check(family, engine, preempt_and_evict)
    assert engine.status().swapped_in_blocks_total == 0
    assert engine._scheduler.totals.recomputed_tokens > 250


@families
def test_prompt_lookup_equals_transformers(family: str) -> None:
    config = SpeculativeOptions(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    engine = engine_of(family, speculative_config=config)
    check(family, engine)
    assert engine.status().draft_tokens_total > 0


@families
def test_a_draft_model_equals_transformers(family: str) -> None:
    config = SpeculativeOptions(method="draft_model", model=saved_model(family).directory, num_speculative_tokens=3)
    engine = engine_of(family, speculative_config=config, swap_space=SWAP_SPACE_GIB, kv_cache_bytes=None)
    check(family, engine)
    assert engine.status().accepted_draft_tokens_total > 20, "the model drafts for itself"


@families
def test_several_answers_that_share_a_prompt_equal_transformers(family: str) -> None:
    engine = engine_of(family, num_kv_blocks=64)
    check(family, engine, n=4)
    assert engine.status().prompt_tokens_total == 2 * sum(PROMPT_LENS), "a prompt is computed and counted once"


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_with_swaps_or_several_answers_equal_transformers(method: str) -> None:
    model = saved_model("qwen3").directory if method == "draft_model" else None
    config = SpeculativeOptions(method=method, model=model, num_speculative_tokens=2, prompt_lookup_min=1)
    engine = engine_of("llama", speculative_config=config, swap_space=SWAP_SPACE_GIB, num_kv_blocks=64)
    check("llama", engine, preempt_and_evict if method == "ngram" else None, n=1 if method == "ngram" else 3)
    assert engine.status().draft_tokens_total > 0
