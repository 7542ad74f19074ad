"""Products with quantised weights use the kernels of their device, which accept what the engine passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from engine.config.stored_weights import Activations
from engine.quantization.products import fp8_product
from engine.runner.model_runner import ModelRunner
from kernels import ops, quantised_linear
from kernels.quantised_weights import pack_int4
from kernels.reference import quantised as reference
from kernels.triton.products.fp8 import linear_fp8
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.kernel_tables import replace_table
from tests.support.tiny_models import saved_model

ROUNDED = 0.01  # float16 results of 64 products near one
FEW, MANY = 3, 17  # inputs of up to 16 rows are not quantised
OUTPUTS, COLUMNS = 32, 64
CPU_MODULES = quantised_linear._MODULES["cpu"]


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on the CPU go to the Triton kernels, which the interpreter runs."""
    monkeypatch.setitem(quantised_linear._MODULES, "cpu", quantised_linear._MODULES["cuda"])
    quantised_linear._load_function.cache_clear()
    yield
    quantised_linear._load_function.cache_clear()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    rows: torch.Tensor = torch.randn(MANY, COLUMNS) / float(COLUMNS) ** 0.5
    return rows.half()


@pytest.fixture
def bias() -> torch.Tensor:
    return torch.linspace(-1, 1, OUTPUTS).half()


def weight() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(OUTPUTS, COLUMNS)


@pytest.mark.usefixtures("on_triton")
def test_8_bit_integers_match_the_reference(x: torch.Tensor, bias: torch.Tensor) -> None:
    packed = ops.pack_int8(weight())
    assert_close(ops.bind_int8(packed, bias)(x), reference.linear_int8(x, packed, bias=bias))


@pytest.mark.usefixtures("on_triton")
def test_4_bit_weights_match_the_reference(x: torch.Tensor, bias: torch.Tensor) -> None:
    packed = pack_int4(weight(), 32)
    assert_close(ops.bind_int4(packed, bias)(x), reference.linear_int4(x, packed, bias=bias))


@pytest.mark.usefixtures("on_triton")
@pytest.mark.parametrize("activations", Activations)
def test_8_bit_floats_match_the_reference_with_inputs_rounded_or_not(
    activations: Activations, x: torch.Tensor, bias: torch.Tensor
) -> None:
    packed, scale = ops.pack_fp8(weight()), torch.tensor([0.01])
    product = fp8_product(packed, bias, activations, [(OUTPUTS, scale)])
    found = product(x)
    assert_close(product(x[:FEW]), reference.linear_fp8(x[:FEW], packed, bias=bias))
    values: torch.Tensor
    scales: torch.Tensor | None
    values, scales = quantised_linear.quantize_rows_fp8(x)  # the interpreter does not round to the nearest
    if activations is Activations.STATIC:
        values, scales = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
    if activations is Activations.UNTOUCHED:
        values, scales = x, None
    expected = reference.linear_fp8(values, packed, x_scales=scales, out_dtype=torch.float16, bias=bias)
    assert_close(found, expected)


@pytest.mark.usefixtures("on_triton")
def test_rows_of_one_weight_have_inputs_rounded_by_scales_of_their_own(x: torch.Tensor, bias: torch.Tensor) -> None:
    """A few rows of inputs are not quantised, and multiplied with the whole weight at once."""
    packed = ops.pack_fp8(weight())
    product = fp8_product(packed, bias, Activations.STATIC, [(16, torch.tensor([0.01])), (16, torch.tensor([0.002]))])
    found = product(x)
    for first, scale in ((0, 0.01), (16, 0.002)):
        part = slice(first, first + 16)
        values = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        own = ops.Fp8Weight(packed.values[part], packed.scales[part])
        x_scales = torch.tensor([scale])
        expected = reference.linear_fp8(values, own, x_scales=x_scales, out_dtype=torch.float16, bias=bias[part])
        assert_close(found[:, part], expected)
    with mock.patch("kernels.triton.products.quantised.linear_fp8", wraps=linear_fp8) as launched:
        assert_close(product(x[:FEW]), reference.linear_fp8(x[:FEW], packed, bias=bias))
    assert launched.call_count == 1


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = ROUNDED) -> None:
    assert found.dtype is torch.float16
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("on_triton")
def test_an_8_bit_model_gives_the_same_tokens_with_norms_fused_into_products() -> None:
    model = saved_model("llama", num_hidden_layers=2, head_dim=16).directory
    options: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 32, "num_kv_blocks": 4, "quantization": "int8"}
    request = generation_request("a", [5, 6, 7], max_tokens=3)
    with replace_table("cpu", "cuda"):
        engine = small_engine(model, **options)
        assert isinstance(engine.runner, ModelRunner)
        assert engine.runner.target._decoder._fused is not None
        found = tokens(run_to_end(engine, [request])["a"])
    quantised_linear._load_function.cache_clear()
    quantised_linear._MODULES["cpu"] = CPU_MODULES
    assert found == tokens(run_to_end(small_engine(model, **options), [request])["a"])
