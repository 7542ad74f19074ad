"""A batch-invariant engine with the Triton kernels: a request is bit-identical alone, in a batch, and in any chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.protocol import TokenEvent
from kernels import ops, quantised_linear
from tests.support import quantised_checkpoints as layouts
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.interpreted_fp8 import correct_e4m3
from tests.support.interpreted_rows import make_dot_row_invariant
from tests.support.kernel_tables import replace_table
from tests.support.tiny_models import saved_model

PROMPTS = {"a": [5, 6, 7], "b": list(range(3, 37)), "c": [8], "d": [5, 6, 9, 4, 11]}
SMALL: dict[str, Any] = {"max_model_len": 48, "num_kv_blocks": 12, "block_size": 16, "batch_invariant": True}
ALONE: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
FORMATS: dict[str, Any] = {
    "float32": {},
    "fp8": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "mixture": {},
}


@pytest.fixture(autouse=True)
def on_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights on the CPU go to the Triton kernels, which the interpreter runs, rounding and multiplying as a card does."""
    if device.type != "cpu":
        pytest.skip("on a GPU the kernels serve, and bench/gpu.sh compares what they say")
    make_dot_row_invariant(monkeypatch)
    correct_e4m3(monkeypatch)
    monkeypatch.setitem(quantised_linear._MODULES, "cpu", quantised_linear._MODULES["cuda"])
    quantised_linear._load_function.cache_clear()
    with replace_table("cpu", "cuda"):
        yield
    quantised_linear._load_function.cache_clear()


def bits(events: list[TokenEvent]) -> list[tuple[int, float]]:
    pairs = [pair for event in events for pair in zip(event.token_ids, event.logprobs or [], strict=True)]
    return [(token, entry.logprob) for token, entry in pairs]


def answers(model: Path, names: list[str], **options: Any) -> dict[str, list[tuple[int, float]]]:
    engine = small_engine(model, **SMALL, **options)
    assert "own order" in engine.info.kernels
    assert "batch-invariant" in engine.info.kernels
    asked = [
        generation_request(name, PROMPTS[name], max_tokens=3, logprobs=1, temperature=float(name == "d"), seed=1)
        for name in names
    ]
    return {name: bits(events) for name, events in run_to_end(engine, asked).items()}


@pytest.mark.parametrize("name", FORMATS)
def test_a_request_has_the_same_bits_alone_and_among_others_in_chunks(name: str) -> None:
    family = "qwen3_moe" if name == "mixture" else "llama"
    model = saved_model(family, num_hidden_layers=1, head_dim=16).directory
    expected = {each: answers(model, [each], **ALONE, **FORMATS[name])[each] for each in ("b", "d")}
    for budget in (7, 16):
        together = answers(model, list(PROMPTS), max_num_seqs=4, max_num_batched_tokens=budget, **FORMATS[name])
        assert {each: together[each] for each in expected} == expected


def test_tokens_equal_those_of_torch(llama: Path) -> None:
    found = answers(llama, ["a", "b"], max_num_seqs=4)
    with mock.patch.dict(ops._TABLES, cpu="kernels.torch.table"):
        engine = small_engine(llama, **SMALL)
        events = run_to_end(engine, [generation_request(name, PROMPTS[name], max_tokens=3) for name in found])
    assert {name: [token for token, _ in each] for name, each in found.items()} == {
        name: tokens(each) for name, each in events.items()
    }


STORED = {
    "gptq in an order": layouts.gptq(desc_act=True),
    "fp8, inputs of values by another scale": layouts.fp8(per_row=False, activations="static", compressed=False),
}


@pytest.mark.parametrize("layout", STORED.values(), ids=STORED)
def test_quantised_checkpoints_are_bit_identical_too(layout: layouts.Layout, tmp_path: Path) -> None:
    plain = saved_model("llama", **layouts.SIZES).directory
    model = layouts.write(plain, tmp_path / "quantised", layout).directory
    alone = answers(model, ["b"], dtype="float16", **ALONE)
    assert answers(model, list(PROMPTS), dtype="float16", max_num_seqs=4, max_num_batched_tokens=16)["b"] == alone["b"]
