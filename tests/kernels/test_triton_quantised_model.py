"""Quantised models on the Triton operation table: tokens, launches, and output heads."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loop import Engine
from kernels import ops, quantised_linear
from kernels.quantised_weights import Fp8Weight, Int8Weight
from kernels.triton.products import fused_linear
from kernels.triton.products.tiles import FLOAT32_FEW_ROWS
from kernels.triton.sampling import greedy_head
from tests.support import hub_checkpoints as hub
from tests.support import quantised_checkpoints as layouts
from tests.support.engines import generation_request, overlapped_engine, run_to_end, small_engine, tokens
from tests.support.interpreted_bf16 import correct_bf16
from tests.support.kernel_tables import replace_table
from tests.support.tiny_models import make_model, saved_model

LAUNCHES_OF_A_LAYER = 5  # of one request: qkv, attention, out, gate and up, down
PROMPTS = {"a": [5, 6, 7], "b": list(range(3, 21)), "c": [8]}
MAX_TOKENS = 3
FUSED_PRODUCTS = 2 * 4 - 1  # of two layers in a step: the very first stands behind a norm of its own
ROUNDED = 0.1  # of logits of about 10
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 32, "num_kv_blocks": 8, "max_num_batched_tokens": 16}


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Iterator[None]:
    """Weights on the CPU go to the Triton kernels, which the interpreter runs, in bfloat16 as a card computes with it."""
    if device.type != "cpu":
        pytest.skip("on a GPU the kernels serve, and bench/gpu.sh compares what they say")
    correct_bf16(monkeypatch)
    monkeypatch.setitem(quantised_linear._MODULES, "cpu", quantised_linear._MODULES["cuda"])
    quantised_linear._load_function.cache_clear()
    yield
    quantised_linear._load_function.cache_clear()


def answers(make: Callable[..., Engine], model: Path, **options: Any) -> dict[str, list[int]]:
    with replace_table("cpu", "cuda"):
        engine = make(model, **SMALL, **options)
        events = run_to_end(
            engine, [generation_request(name, prompt, max_tokens=MAX_TOKENS) for name, prompt in PROMPTS.items()]
        )
    return {name: tokens(each) for name, each in events.items()}


def model_in(
    folder: Path, layout: layouts.Layout | None = None, *, num_layers: int = 2, tied: bool = False
) -> layouts.WrittenCheckpoint:
    settings = {**layouts.SIZES, "num_hidden_layers": num_layers, "head_dim": 16, "tie_word_embeddings": tied}
    plain = saved_model("llama", **settings).directory
    if layout is None:
        return layouts.WrittenCheckpoint(plain, plain, layouts.awq())
    return layouts.write(plain, folder / "written", layout)


FP8_STATIC = layouts.fp8(per_row=False, activations="static", compressed=False)
FP8_BY_TOKEN = layouts.fp8(per_row=True, activations="dynamic", compressed=True)
FUSED = {
    "awq": layouts.awq(),
    "gptq in another order": layouts.gptq(desc_act=True),
    "llm-compressor, 4 bits with zero points": hub.packed_4_bits(symmetric=False),
    "llm-compressor, int8": hub.int8(),
    "fp8, a stored scale for the inputs of values and another for those of queries": FP8_STATIC,
    "fp8, rows as they are": layouts.fp8(per_row=True, activations="none", compressed=True),
}


@pytest.mark.parametrize("layout", FUSED.values(), ids=FUSED)
def test_fused_layers_give_the_most_likely_tokens_of_the_checkpoint(layout: layouts.Layout, tmp_path: Path) -> None:
    """Each token is the most likely one of the float32 twin, or one that rounding to bfloat16 cannot tell from it. Few rows
    are never rounded to 8 bits, whatever the checkpoint does to many: no step here has more than 16."""
    written = model_in(tmp_path, replace(layout, rounds_input=None))
    reference = written.reference()
    with mock.patch.object(fused_linear, "_launch", wraps=fused_linear._launch) as fused:
        answered = answers(overlapped_engine, written.directory, dtype="bfloat16")
    assert fused.call_count >= (MAX_TOKENS - 1) * FUSED_PRODUCTS
    assert fused.call_count % FUSED_PRODUCTS == 0
    assert_most_likely(answered, reference, ROUNDED)


def assert_most_likely(answered: dict[str, list[int]], reference: Any, rounded: float) -> None:
    for name, prompt in PROMPTS.items():
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answered[name]])).logits[0, len(prompt) - 1 : -1]
        lost = logits.amax(-1) - logits.gather(-1, torch.tensor(answered[name])[:, None])[:, 0]
        assert float(lost.max()) < rounded, (name, lost)


SCALED = {"layernorm": 64.0, "embed_tokens": 500.0, "o_proj": 500.0, "down_proj": 500.0}
SCALED |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 1 / 64)
"""The same model, but for rounding: a residual stream of thousands, which its norms multiply by 64."""


@pytest.mark.parametrize("layout", [None, layouts.awq()], ids=["plain", "awq"])
def test_rows_of_float16_do_not_overflow_before_they_are_divided(layout: layouts.Layout | None, tmp_path: Path) -> None:
    settings = {**layouts.SIZES, "num_hidden_layers": 2, "head_dim": 16, "tie_word_embeddings": False}
    make_model("llama", tmp_path / "plain", **settings)
    file = tmp_path / "plain" / "model.safetensors"
    factors = {name: next((SCALED[each] for each in SCALED if each in name), 1.0) for name in load_file(file)}
    save_file({name: tensor * factors[name] for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    written = layouts.WrittenCheckpoint(tmp_path / "plain", tmp_path / "plain", layouts.awq())
    if layout is not None:
        written = layouts.write(tmp_path / "plain", tmp_path / "written", layout)
    with mock.patch.object(fused_linear, "_launch", wraps=fused_linear._launch) as fused:
        answered = answers(overlapped_engine, written.directory, dtype="float16")
    assert fused.call_count >= (MAX_TOKENS - 1) * FUSED_PRODUCTS
    assert_most_likely(answered, written.reference(), ROUNDED / 8)


def launches_of_a_step(model: Path, **options: Any) -> int:
    """Of one decode step."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    execute = interpreter.GridExecutor.__call__
    launches = 0

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal launches
        launches += 1
        return execute(self, *arguments, **named)

    with replace_table("cpu", "cuda"), mock.patch.object(interpreter.GridExecutor, "__call__", counted):
        engine = overlapped_engine(model, max_num_seqs=2, max_model_len=16, num_kv_blocks=2, **options)
        engine.submit(generation_request("a", [5, 6], max_tokens=4))
        engine.step()
        launches = 0
        engine.step()
    return launches


@pytest.mark.parametrize("layout", [layouts.awq(), FP8_BY_TOKEN, FP8_STATIC], ids=["awq", "fp8", "fp8-static"])
def test_a_decode_step_takes_five_launches_per_layer(layout: layouts.Layout, tmp_path: Path) -> None:
    counts = {
        num_layers: launches_of_a_step(
            model_in(tmp_path / str(num_layers), layout, num_layers=num_layers).directory, dtype="bfloat16"
        )
        for num_layers in (1, 2)
    }
    assert counts[2] - counts[1] == LAUNCHES_OF_A_LAYER


ALONE: dict[str, dict[str, Any]] = {
    "gemma2": {"num_hidden_layers": 1},
    "qwen3_moe": {"moe_intermediate_size": 32},
    "llama": {"num_hidden_layers": 1, "tie_word_embeddings": True},
}
"""Norms on both sides of a branch and mixtures of experts keep their launches; a head that is quantised stands for itself."""


@pytest.mark.parametrize("family", ALONE)
def test_few_rows_are_never_quantised(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved_model(family, **{**layouts.SIZES, "num_hidden_layers": 2, "head_dim": 16, **ALONE[family]}).directory
    rounded = mock.Mock()
    for module in ("norm", "activation", "fp8"):
        monkeypatch.setattr(f"kernels.triton.rows.{module}.allocate_fp8_rows", rounded)
    answers(overlapped_engine, model, quantization="fp8", dtype="bfloat16")
    assert not rounded.called


def test_fp8_made_while_reading_gives_the_tokens_of_the_plain_runner(tmp_path: Path) -> None:
    """Steps of few rows leave them as they are in both."""
    model = model_in(tmp_path, num_layers=1).directory
    with mock.patch.object(fused_linear, "_launch", wraps=fused_linear._launch) as fused:
        plain = answers(small_engine, model, quantization="fp8")
        assert fused.call_count, "the plain runner fuses as well"
        assert answers(overlapped_engine, model, quantization="fp8") == plain


@pytest.fixture
def heads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The weights of greedy heads, whose tiles are those of a vocabulary that is not tiny."""
    found: list[object] = []

    def bound(weight: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def choose(hidden: torch.Tensor) -> torch.Tensor:
            found.append(weight)
            return greedy_head.greedy_head(hidden, weight)

        return choose

    table = replace(ops.operations(torch.device("cuda")), bind_greedy_head=bound)
    monkeypatch.setattr(ops, "_load_table", lambda _: table)
    monkeypatch.setattr("kernels.triton.products.int8.byte_tiles", lambda *_, **__: FLOAT32_FEW_ROWS)
    return found


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"quantization": "int8"}, True),
        ({"head_quantization": "int8"}, True),
        ({"head_quantization": "int8"}, False),
        ({"quantization": "fp8"}, False),
    ],
    ids=str,
)
def test_greedy_steps_with_a_fused_head_give_the_tokens_of_the_plain_runner(
    options: dict[str, str], tied: bool, tmp_path: Path, heads: list[object]
) -> None:
    model = model_in(tmp_path, num_layers=1, tied=tied).directory
    plain = answers(small_engine, model, **options)
    assert not heads, "the plain runner looks for the largest of the logits"
    assert answers(overlapped_engine, model, **options) == plain
    assert heads
    kind = Fp8Weight if options.get("quantization") == "fp8" else Int8Weight
    assert all(isinstance(weight, kind) for weight in heads)
