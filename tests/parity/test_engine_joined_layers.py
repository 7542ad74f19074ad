"""Decode steps as one call: the very log-probabilities of layers that are called one by one, in families of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.loop import Engine
from engine.models.decoder import Decoder
from engine.models.joined_layers import MAX_ROWS
from engine.runner.model_runner import ModelRunner
from kernels.simd.vectors import LANES
from tests.support.engines import run_to_end, small_engine, wanted
from tests.support.tiny_models import make_model

FAMILIES = ("llama-biased", "mistral-window", "qwen3", "gemma2", "gemma3_text", "granite", "olmo2")
HEADS: dict[str, Any] = {"head_dim": LANES, "hidden_size": 4 * LANES}
COUNTS = (1, 3, 16)


def scores(engine: Engine, count: int) -> list[list[tuple[int, float, tuple[float, ...]]]]:
    """Tokens and log-probabilities of `count` requests of different lengths at once."""
    asked = [
        wanted(str(index), [3 + index, *range(5, 9 + 2 * index)], max_tokens=6 + index % 3, logprobs=2)
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


def decoder_of(engine: Engine) -> Decoder:
    assert isinstance(engine.runner, ModelRunner)
    decoder = engine.runner.text_model.forward
    assert isinstance(decoder, Decoder)
    return decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_layers_give_the_bits_of_layers_one_by_one(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path, **HEADS)
    joined, apart = (small_engine(tmp_path, max_num_seqs=MAX_ROWS) for _ in range(2))
    decoder_of(apart)._can_join = False
    for count in COUNTS:
        assert scores(joined, count) == scores(apart, count)
    assert decoder_of(joined)._joined is not None


def test_layers_that_torch_has_a_part_in_stay_apart(tmp_path: Path) -> None:
    make_model("qwen3_moe", tmp_path, **HEADS)
    engine = small_engine(tmp_path)
    assert all(scores(engine, 2))
    assert decoder_of(engine)._joined is None
    assert not decoder_of(engine)._can_join
