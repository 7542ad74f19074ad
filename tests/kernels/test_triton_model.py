"""A whole model through the table of Triton kernels: the tokens of the table for CPUs, by the plain and the overlapped loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loop import Engine
from kernels import ops
from tests.support.engines import overlapped_engine, run_to_end, small_engine, tokens, wanted
from tests.support.tiny_models import make_model

PROMPTS = {"a": [5, 6, 7], "b": list(range(3, 21)), "c": [8]}
MAX_TOKENS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def answers(make: Callable[..., Engine], model: Path, table: str, **options: Any) -> dict[str, list[int]]:
    with ops.replaced("cpu", table) if table != "cpu" else contextlib.nullcontext():
        engine = make(model, max_num_seqs=4, max_model_len=32, num_kv_blocks=8, **options)
        events = run_to_end(engine, [wanted(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in PROMPTS.items()])
    return {name: tokens(each) for name, each in events.items()}


@pytest.mark.parametrize("make", [small_engine, overlapped_engine], ids=["plain", "overlapped"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_model_says_the_same_through_the_kernels_and_through_torch(
    family: str, make: Callable[..., Engine], folder: Path, device: torch.device
) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU the kernels serve, and bench/gpu.sh compares what they say")
    model = folder / family
    if not model.is_dir():
        make_model(family, model, num_hidden_layers=2, head_dim=16, vocab_size=128)
    options = {"block_size": 16, "max_num_batched_tokens": 16}
    assert answers(make, model, "cuda", **options) == answers(small_engine, model, "cpu", **options)
