"""Decode steps as one call: the very log-probabilities of the plain runner, in families of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.loop import Engine
from engine.runner.slot_runner import SlotRunner
from kernels.simd.vectors import LANES
from tests.support.engines import generation_request, recorded_engine, run_to_end, small_engine
from tests.support.tiny_models import make_model

FAMILIES = ("llama-biased", "mistral-window", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2")
HEADS: dict[str, Any] = {"head_dim": LANES, "hidden_size": 4 * LANES}
COUNTS = (1, 3, 16)


def scores(engine: Engine, count: int) -> list[list[tuple[int, float, tuple[float, ...]]]]:
    """Tokens and log-probabilities of `count` requests of different lengths at once."""
    asked = [
        generation_request(str(index), [3 + index, *range(5, 9 + 2 * index)], max_tokens=6 + index % 3, logprobs=2)
        for index in range(count)
    ]
    return [
        [
            (token_id, entry.logprob, tuple(entry.top_logprobs))
            for event in events
            for token_id, entry in zip(event.token_ids, event.logprobs or [], strict=True)
        ]
        for events in run_to_end(engine, asked).values()
    ]


def is_recorded(engine: Engine) -> bool:
    assert isinstance(engine.runner, SlotRunner)
    return engine.runner.is_recorded


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_give_the_bits_of_operations_one_by_one(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path, **HEADS)
    recorded, plain = recorded_engine(tmp_path), small_engine(tmp_path)
    for count in COUNTS:
        assert scores(recorded, count) == scores(plain, count)
    assert is_recorded(recorded)


def test_steps_that_torch_has_a_part_in_are_computed_one_by_one(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path, **HEADS)
    engine = recorded_engine(tmp_path)
    assert all(scores(engine, 2))
    assert not is_recorded(engine)
