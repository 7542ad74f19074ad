"""Gated activations, with and without e4m3 output: the Triton kernels against float32."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import activation as reference
from kernels.triton.rows import activation
from tests.support.interpreted_fp8 import correct_e4m3
from tests.support.kernel_cases import FLOATS, Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same

NAMES = pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])


@pytest.fixture(autouse=True)
def _e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    correct_e4m3(monkeypatch)


@NAMES
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "inner"), [(1, 14336), (3, 64), (17, 96), (2, 515), (300, 40)])
def test_gated_activations_equal_their_definitions(
    name: str, tokens: int, inner: int, dtype: torch.dtype, device: torch.device
) -> None:
    gate_up = padded_rows(normal(tokens, 2 * inner, dtype=dtype, device=device) * 5, 2 * inner + 16)
    before = gate_up.clone()
    out = Guarded((tokens, inner), dtype, device)
    getattr(activation, name)(gate_up, out=out.tensor)
    # 1 + tanh of the reference cancels where the gate is nearly closed; gate · up is of the order of 25.
    assert_near(out.check(), getattr(reference, name)(gate_up), "pointwise", scale=25)
    assert_same(gate_up, before)


@NAMES
def test_large_gate_inputs_saturate_without_nan(name: str, device: torch.device) -> None:
    gates = torch.tensor([-6e4, -1e4, -200.0, -0.0, 0.0, 200.0, 1e4], device=device)
    made = getattr(activation, name)(torch.cat([gates, torch.ones(7, device=device)])[None])
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 200.0, 1e4]], device=device)
    assert_near(made, expected, "pointwise")


@NAMES
def test_bfloat16_is_read_and_written(name: str, device: torch.device) -> None:
    gate_up = normal(3, 192, dtype=torch.bfloat16, device=device)
    assert_near(getattr(activation, name)(gate_up), getattr(reference, name)(gate_up), "pointwise")


@NAMES
def test_an_empty_batch_gives_an_empty_result(name: str, device: torch.device) -> None:
    nothing = torch.empty(0, 64, device=device)
    assert getattr(activation, name)(nothing).shape == (0, 32)
    assert getattr(activation, f"{name}_fp8")(nothing)[1].shape == (0, 1)


@NAMES
@pytest.mark.parametrize(("tokens", "inner"), [(1, 64), (5, 96), (2, 2050), (17, 15)])
def test_quantised_activations_hold_the_activation(name: str, tokens: int, inner: int, device: torch.device) -> None:
    gate_up = padded_rows(normal(tokens, 2 * inner, dtype=torch.float16, device=device) * 5, 2 * inner + 16)
    quantised, scales = getattr(activation, f"{name}_fp8")(gate_up)
    expected, expected_scales = getattr(reference, f"{name}_fp8")(gate_up)
    assert quantised.dtype == torch.float8_e4m3fn
    assert_near(scales, expected_scales, "normed")
    assert_near(quantised, expected, "fp8")


def test_a_tile_depends_only_on_whether_there_are_many_rows() -> None:
    assert activation.column_tile(1, 14336) == activation.column_tile(255, 14336)
    assert activation.column_tile(256, 14336) == activation.column_tile(100_000, 14336) == (2048, 4)
    assert activation.column_tile(256, 3072) == (1024, 4)
