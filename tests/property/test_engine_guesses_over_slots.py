"""Engines that guess by prompt lookup over slots say what the plain runner says without guesses, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.loop import Engine
from engine.speculation.options import SpeculativeOptions
from kernels.simd.vectors import LANES
from tests.support.engine_histories import MAX_LEN, Asked, asked, assert_as_alone, repeating, run, with_grammars
from tests.support.engines import overlapped_engine, recorded_engine
from tests.support.tiny_models import make_model

FAMILIES = ("llama", "mistral-window", "gemma2")
LOOPS = {"launched ahead": overlapped_engine, "recorded": recorded_engine}
MakeEngine = Callable[..., Engine]


def guessing(num_tokens: int = 3, **options: Any) -> SpeculativeOptions:
    return SpeculativeOptions.parse({"method": "ngram", "num_speculative_tokens": num_tokens, **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_model(family, folder / family, head_dim=LANES, hidden_size=4 * LANES)
    return folder


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    loop=st.sampled_from(sorted(LOOPS)),
    family=st.sampled_from(FAMILIES),
    requests=st.lists(repeating | asked, min_size=1, max_size=7),
    depth=st.sampled_from((1, 3, 8)),
    budget=st.sampled_from((7, 16, 512)),
    block_size=st.sampled_from((4, 16)),
    seats=st.sampled_from((2, 5, 16)),
    spare_blocks=st.sampled_from((0, 8, 1000)),
    caches=st.booleans(),
    preempt_at=st.none() | st.integers(1, 12),
    swap_space=st.sampled_from((0.0, 0.002)),
)
def test_tokens_are_those_of_the_plain_runner_without_guesses(
    folder: Path,
    loop: str,
    family: str,
    requests: list[Asked],
    depth: int,
    budget: int,
    block_size: int,
    seats: int,
    spare_blocks: int,
    caches: bool,
    preempt_at: int | None,
    swap_space: float,
) -> None:
    engine = LOOPS[loop](
        folder / family,
        speculative_config=guessing(depth),
        max_num_batched_tokens=max(budget, seats),
        block_size=block_size,
        max_num_seqs=seats,
        max_model_len=MAX_LEN,
        num_kv_blocks=MAX_LEN // block_size + spare_blocks * 16 // block_size,
        enable_prefix_caching=caches,
        swap_space=swap_space,
    )
    assert_as_alone(folder, family, requests, run(with_grammars(engine), requests, preempt_at=preempt_at))
    assert engine.fallbacks.count == 0
