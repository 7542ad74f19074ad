"""RMS normalisation, with residual sum and with e4m3 output: the Triton kernels and the torch ones against float32."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kernels.reference import fp8_rows as reference_fp8_rows
from kernels.reference import norm as reference
from kernels.torch import fp8_rows as cpu_fp8_rows
from kernels.torch import norm as cpu_norm
from kernels.triton.rows import fp8 as triton_fp8_rows
from kernels.triton.rows import norm as triton_norm
from tests.support.interpreted_fp8 import correct_e4m3
from tests.support.kernel_cases import FLOATS, Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same

EPS = 1e-6
SHAPES = [(1, 64), (1, 4096), (3, 128), (17, 96), (5, 130), (2, 1031)]
# Torch rounds a multiplier to float16; on a CPU it serves float32.
BOTH_IN_THEIR_DTYPES = pytest.mark.parametrize(
    ("kernels", "dtype"),
    [*((triton_norm, dtype) for dtype in FLOATS), (cpu_norm, torch.float32)],
    ids=["triton-float32", "triton-float16", "torch-float32"],
)


@pytest.fixture(autouse=True)
def _e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    correct_e4m3(monkeypatch)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_rms_norm_equals_its_definition(tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    x = padded_rows(normal(tokens, hidden, dtype=dtype, device=device) * 30, hidden + 8)
    weight = normal(hidden, dtype=dtype, device=device, seed=1)
    out = Guarded((tokens, hidden), dtype, device)
    triton_norm.rms_norm(x, weight, EPS, out=out.tensor)
    assert_near(out.check(), reference.rms_norm(x, weight, EPS), "normed")


def test_heads_of_tokens_are_normalised_separately(device: torch.device) -> None:
    x = normal(5, 6, 64, dtype=torch.float16, device=device)
    weight = normal(64, dtype=torch.float16, device=device, seed=1)
    assert_near(triton_norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), "normed")


def test_a_weight_in_float32_is_not_rounded(device: torch.device) -> None:
    x, weight = normal(3, 96, dtype=torch.float16, device=device), normal(96, dtype=torch.float32, device=device, seed=1)
    assert_near(triton_norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), "normed")
    assert_near(cpu_norm.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), "normed")


def test_bfloat16_is_read_and_written(device: torch.device) -> None:
    x, weight = normal(3, 96, dtype=torch.bfloat16, device=device), normal(96, dtype=torch.bfloat16, device=device, seed=1)
    normed, total = triton_norm.add_rms_norm(x, x, weight, EPS)
    expected, expected_total = reference.add_rms_norm(x, x, weight, EPS)
    assert_near(normed, expected, "normed")
    assert_near(total, expected_total, "pointwise")


def test_a_row_of_zeros_stays_zero(device: torch.device) -> None:
    x, weight = torch.zeros(2, 128, device=device), torch.ones(128, device=device)
    assert_same(triton_norm.rms_norm(x, weight, EPS), x)
    quantised, scales = triton_norm.rms_norm_fp8(x, weight, EPS)
    assert_same(quantised.float(), x)
    assert bool(torch.isfinite(scales).all())


@BOTH_IN_THEIR_DTYPES
@pytest.mark.parametrize("alpha", [1.0, 0.22])
@pytest.mark.parametrize(("tokens", "hidden"), SHAPES)
def test_sum_and_norm_equal_their_definition(
    kernels: ModuleType, tokens: int, hidden: int, dtype: torch.dtype, alpha: float, device: torch.device
) -> None:
    x = normal(tokens, hidden, dtype=dtype, device=device)
    residual = normal(tokens, hidden, dtype=dtype, device=device, seed=2) * 4
    weight = normal(hidden, dtype=dtype, device=device, seed=1)
    before = x.clone(), residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, EPS, alpha=alpha)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, EPS, alpha=alpha)
    assert_near(total, expected_total, "pointwise", scale=4)
    assert_near(normed, expected, "normed", scale=4)
    assert_same(x, before[0])
    assert_same(residual, before[1])


@BOTH_IN_THEIR_DTYPES
def test_the_branch_is_normalised_before_the_residual_sum(
    kernels: ModuleType, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = normal(5, 96, dtype=dtype, device=device) * 9, normal(5, 96, dtype=dtype, device=device, seed=2)
    weight, branch_weight = (normal(96, dtype=torch.float32, device=device, seed=seed) for seed in (3, 4))
    for last in (weight, None):
        normed, total = kernels.add_rms_norm(x, residual, last, EPS, alpha=0.5, branch_weight=branch_weight)
        expected, expected_total = reference.add_rms_norm(x, residual, last, EPS, alpha=0.5, branch_weight=branch_weight)
        assert_near(total, expected_total, "normed", scale=4)
        assert_near(normed, expected, "normed", scale=4)


def test_the_sum_may_overwrite_the_residual_in_place(device: torch.device) -> None:
    x, weight = normal(5, 130, dtype=torch.float16, device=device), normal(130, dtype=torch.float16, device=device, seed=1)
    normed, total = Guarded((5, 130), torch.float16, device), Guarded((5, 130), torch.float16, device)
    total.tensor.copy_(normal(5, 130, dtype=torch.float16, device=device, seed=2))
    expected, expected_total = reference.add_rms_norm(x, total.tensor.clone(), weight, EPS)
    triton_norm.add_rms_norm(x, total.tensor, weight, EPS, out=(normed.tensor, total.tensor))
    assert_near(normed.check(), expected, "normed")
    assert_near(total.check(), expected_total, "pointwise")


def test_an_empty_batch_gives_an_empty_result(device: torch.device) -> None:
    x, weight = torch.empty(0, 128, device=device), torch.ones(128, device=device)
    assert triton_norm.rms_norm(x, weight, EPS).shape == (0, 128)
    assert triton_norm.add_rms_norm_fp8(x, x, weight, EPS)[1].shape == (0, 1)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 128), (17, 96), (2, 1031)])
def test_quantised_norms_equal_their_definition(tokens: int, hidden: int, device: torch.device) -> None:
    x = normal(tokens, hidden, dtype=torch.float16, device=device) * 3
    residual = normal(tokens, hidden, dtype=torch.float16, device=device, seed=2)
    weight = normal(hidden, dtype=torch.float32, device=device, seed=1)
    compare_fp8(triton_norm.rms_norm_fp8(x, weight, EPS), reference.rms_norm_fp8(x, weight, EPS))
    quantised, scales, total = triton_norm.add_rms_norm_fp8(x, residual, weight, EPS, alpha=0.5)
    expected, expected_scales, expected_total = reference.add_rms_norm_fp8(x, residual, weight, EPS, alpha=0.5)
    compare_fp8((quantised, scales), (expected, expected_scales))
    assert_near(total, expected_total, "pointwise")


@pytest.mark.parametrize("kernels", [triton_fp8_rows, cpu_fp8_rows], ids=["triton", "torch"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 128), (17, 96), (2, 1031)])
def test_rows_are_quantised_to_their_own_largest_element(
    kernels: ModuleType, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> None:
    x = padded_rows(normal(tokens, hidden, dtype=dtype, device=device), hidden + 8)
    x[0] *= 100
    quantised, scales = kernels.quantize_rows_fp8(x)
    compare_fp8((quantised, scales), reference_fp8_rows.quantize_rows_fp8(x))
    assert_near(scales[:, 0] * 448, x.float().abs().amax(-1), "pointwise")


@pytest.mark.parametrize("kernels", [triton_fp8_rows, cpu_fp8_rows, reference_fp8_rows], ids=["triton", "torch", "reference"])
def test_nan_affects_only_its_row(kernels: ModuleType, device: torch.device) -> None:
    x = normal(3, 96, dtype=torch.float32, device=device)
    x[1, 5] = float("nan")
    quantised, scales = kernels.quantize_rows_fp8(x)
    rows = (quantised.float() * scales).isnan()
    assert bool(rows[1, 5])
    assert not bool(rows[[0, 2]].any())


def test_rounding_to_e4m3_equals_that_of_torch() -> None:
    torch.manual_seed(1)
    x = torch.cat([torch.randn(4000) * 10.0**exponent for exponent in range(-4, 3)] + [torch.tensor([0.0, 448.0, -448.0])])
    assert_same(reference_fp8_rows.to_fp8(x).float().abs(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float().abs())


def compare_fp8(actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compares codes and scales. Scales are computed in float32; values may be rounded to either neighbour."""
    assert actual[0].dtype == torch.float8_e4m3fn
    assert actual[1].shape == (actual[0].shape[0], 1)
    assert_near(actual[1], expected[1], "normed")
    assert_near(actual[0], expected[0], "fp8")
