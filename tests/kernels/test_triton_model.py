"""A whole model on the Triton operation table gives the CPU table's tokens, in the plain and the overlapped loop."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.loop import Engine
from kernels import ops
from kernels.torch import fp8_rows
from kernels.triton.products.tiles import Tiles
from kernels.triton.sampling import greedy_head
from tests.support.engines import generation_request, overlapped_engine, run_to_end, small_engine, tokens
from tests.support.kernel_tables import replace_table
from tests.support.tiny_models import saved_model

LAUNCHES_OF_A_LAYER = {1: 5, 2: 6}  # by requests: qkv, attention and with several its merge, out, gate and up, down
BEGINNING = ("prepare_decode_kernel", "rotation_rows_kernel")
"""What writes all that `lone_kernel` reads before its wait, but for the cache."""
PROMPTS = {"a": [5, 6, 7], "b": list(range(3, 21)), "c": [8]}
MAX_TOKENS = 3


def answers(make: Callable[..., Engine], model: Path, table: str, **options: Any) -> dict[str, list[int]]:
    with replace_table("cpu", table) if table != "cpu" else contextlib.nullcontext():
        engine = make(model, max_num_seqs=4, max_model_len=32, num_kv_blocks=8, **options)
        events = run_to_end(
            engine, [generation_request(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in PROMPTS.items()]
        )
    return {name: tokens(each) for name, each in events.items()}


@pytest.mark.parametrize(
    ("family", "make"),
    [("llama", small_engine), ("llama", overlapped_engine), ("qwen3_moe", overlapped_engine), ("gemma2", small_engine)],
)
def test_a_model_gives_the_same_tokens_with_kernels_and_torch(
    family: str, make: Callable[..., Engine], device: torch.device
) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU the kernels serve, and bench/gpu.sh compares what they say")
    model = saved_model(family, num_hidden_layers=2, head_dim=16).directory
    options = {"block_size": 16, "max_num_batched_tokens": 16}
    assert answers(make, model, "cuda", **options) == answers(small_engine, model, "cpu", **options)


def test_a_greedy_step_of_few_rows_takes_its_tokens_from_the_fused_head(
    llama: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU the kernels serve, and bench/gpu.sh compares what they say")
    tiles = Tiles(16, 64, 128, num_warps=4, num_stages=4, splits=1)  # what a vocabulary has that is not tiny
    monkeypatch.setattr("kernels.triton.sampling.greedy_head.skinny_tiles", lambda *_: tiles)
    fused = mock.Mock(side_effect=greedy_head.greedy_head)
    monkeypatch.setattr("kernels.triton.sampling.greedy_head.greedy_head", fused)
    options = {"block_size": 16, "max_num_batched_tokens": 16}
    assert answers(overlapped_engine, llama, "cuda", **options) == answers(small_engine, llama, "cpu", **options)
    assert fused.call_count == MAX_TOKENS - 1, "of the steps without prompts"


def widths_rounded_alone(make: Callable[..., Engine], model: Path, table: str) -> Counter[int]:
    """Return how often rows of each width are quantised in a launch of their own, with 8-bit weights and many rows."""
    with mock.patch("kernels.quantised_linear.quantize_rows_fp8", side_effect=fp8_rows.quantize_rows_fp8) as rounded:
        answers(make, model, table, block_size=16, max_num_batched_tokens=32, quantization="fp8")
    shapes = [call.args[0].shape for call in rounded.call_args_list]
    return Counter(width for num_rows, width in shapes if num_rows > ops.FUSED_ROWS_MAX)


def test_norms_and_activations_quantise_the_rows_of_8_bit_products(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("on a GPU the kernels serve, and bench/gpu.sh compares what they say")
    hidden, attended, inner = 64, 128, 96
    sizes = {"hidden_size": hidden, "num_attention_heads": 8, "head_dim": 16, "intermediate_size": inner}
    model = saved_model("llama", num_hidden_layers=3, **sizes).directory
    # Behind the attention of the last layer there are few rows.
    assert widths_rounded_alone(small_engine, model, "cpu") == {inner: 2, attended: 2, hidden: 5}
    assert widths_rounded_alone(overlapped_engine, model, "cuda") == {attended: 2}


@pytest.fixture
def launched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that were launched, in order."""
    if device.type != "cpu":
        pytest.skip("launches are seen in the interpreter")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    execute, names = interpreter.GridExecutor.__call__, []

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        names.append(self.fn.__name__)
        return execute(self, *arguments, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    return names


def launches_of_a_step(launched: list[str], num_requests: int, num_layers: int) -> list[str]:
    model = saved_model("llama", num_hidden_layers=num_layers, head_dim=16).directory
    with replace_table("cpu", "cuda"):
        engine = overlapped_engine(model, max_num_seqs=2, max_model_len=16, num_kv_blocks=4)
        for number in range(num_requests):
            engine.submit(generation_request(str(number), [5, 6], max_tokens=4))
        engine.step()
        launched.clear()
        engine.step()
    return launched.copy()


@pytest.mark.parametrize("num_requests", LAUNCHES_OF_A_LAYER)
def test_a_decode_step_of_few_rows_takes_few_launches_per_layer(num_requests: int, launched: list[str]) -> None:
    totals = [len(launches_of_a_step(launched, num_requests, layers)) for layers in (1, 2)]
    assert totals[1] - totals[0] == LAUNCHES_OF_A_LAYER[num_requests]


def test_early_launched_kernels_read_only_earlier_results_before_their_wait(launched: list[str]) -> None:
    """`kernels.triton.launching.early_launch`: before its wait a kernel may read what the previous one does not write."""
    names = launches_of_a_step(launched, 1, 2)
    lone = [place for place, name in enumerate(names) if name == "lone_kernel"]
    assert len(lone) == 2
    assert set(BEGINNING) <= set(names[: lone[0] - 1])
    assert not set(BEGINNING) & set(names[lone[0] - 1 :])
    assert {names[place - 1] for place in lone} <= {"linear_kernel", "fused_linear_kernel"}, "products, which wait"
