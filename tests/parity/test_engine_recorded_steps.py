"""Recorded decode steps give bit-identical log-probabilities to the plain runner, for families of every kind."""

from __future__ import annotations

import pytest

from engine.loop import Engine
from engine.runner.slot_runner import SlotRunner
from tests.support.engines import generation_request, recorded_engine, run_to_end, small_engine
from tests.support.tiny_models import WIDE_HEADS, saved_model

FAMILIES = ("llama-biased", "mistral-window", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2")
COUNTS = (1, 3, 16)


def tokens_and_logprobs(engine: Engine, count: int) -> list[list[tuple[int, float, tuple[float, ...]]]]:
    """Tokens and log-probabilities of `count` requests of different lengths at once."""
    requests = [
        generation_request(str(index), [3 + index, *range(5, 9 + 2 * index)], max_tokens=6 + index % 3, logprobs=2)
        for index in range(count)
    ]
    return [
        [
            (token_id, entry.logprob, tuple(entry.top_logprobs))
            for event in events
            for token_id, entry in zip(event.token_ids, event.logprobs or [], strict=True)
        ]
        for events in run_to_end(engine, requests).values()
    ]


def is_recorded(engine: Engine) -> bool:
    assert isinstance(engine.runner, SlotRunner)
    return engine.runner.is_recorded


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_are_bit_identical_to_single_operations(family: str) -> None:
    directory = saved_model(family, **WIDE_HEADS).directory
    recorded, plain = recorded_engine(directory), small_engine(directory)
    for count in COUNTS:
        assert tokens_and_logprobs(recorded, count) == tokens_and_logprobs(plain, count)
    assert is_recorded(recorded)


def test_steps_of_a_mixture_of_experts_are_not_recorded() -> None:
    engine = recorded_engine(saved_model("qwen3_moe", **WIDE_HEADS).directory)
    assert all(tokens_and_logprobs(engine, 2))
    assert not is_recorded(engine)
