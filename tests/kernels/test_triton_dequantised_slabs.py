"""Products of many rows with weights dequantised in slabs: against torch's product, and which products use slabs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch.nn import functional

from engine.config.model import parse_model_config
from engine.formats import EIGHT_BITS, Formats
from engine.memory import shape
from engine.simulator.models import CONFIGS
from kernels import quantised_linear
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, pack_fp8, pack_int4, pack_int8
from kernels.reference import quantised as reference
from kernels.triton.products import dequantised_slabs
from kernels.triton.products import fp8 as linear_fp8
from kernels.triton.products import int4 as linear_int4
from kernels.triton.products import int8 as linear_int8
from kernels.triton.products.dequantised_slabs import SLAB_ELEMENTS, TILED_ROWS_MAX, dequantise_rows
from kernels.triton.products.linear import cublas
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same

HALVES = (torch.float16, torch.bfloat16)
COLUMNS = 200
SLAB_ROWS = 48
TIMES_TORCHS = 2.0  # the limit of bench/gpu, whose rows are computed on a card
Weight = Int8Weight | Fp8Weight | Int4Weight


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 48 rows of 200 columns, or of 32 rows of 256."""
    monkeypatch.setattr(dequantised_slabs, "SLAB_ELEMENTS", SLAB_ROWS * COLUMNS)


@pytest.fixture
def filled() -> Iterator[list[int]]:
    """Outputs of every slab that is multiplied."""
    counts: list[int] = []

    def multiply(x: torch.Tensor, slab: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        counts.append(slab.shape[0])
        return cublas(x, slab, bias, out)

    with mock.patch.object(dequantised_slabs, "cublas", multiply):
        yield counts


def rows(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows that are not contiguous. Not NaN but zeros lie behind each: torch multiplies rows here, and its product of bfloat16
    on a CPU with AMX multiplies what is behind a row by zero."""
    wide = torch.zeros(count, COLUMNS + 8, dtype=dtype, device=device)
    wide[:, :COLUMNS] = normal(count, COLUMNS, dtype=dtype, device=device)
    return wide[:, :COLUMNS]


def plain(outputs: int, device: torch.device) -> torch.Tensor:
    return normal(outputs, COLUMNS, dtype=torch.float32, device=device, seed=1) / math.sqrt(COLUMNS)


def int8_weight(outputs: int, device: torch.device) -> Int8Weight:
    """Rows with -128 after each, a code that packing never produces."""
    packed = pack_int8(plain(outputs, device))
    return Int8Weight(padded_rows(packed.values, COLUMNS + 24), packed.scales)


def fp8_weight(outputs: int, device: torch.device) -> Fp8Weight:
    return pack_fp8(plain(outputs, device))


def test_the_memory_plan_matches_the_slab_size() -> None:
    assert shape.SLAB_TOKENS_MIN == TILED_ROWS_MAX + 1
    assert shape.SLAB_ELEMENTS_MAX == SLAB_ELEMENTS


def test_the_memory_plan_counts_the_launches_of_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Llama-8B, without memory; each product's first launch is planned as one of its layer."""
    monkeypatch.setattr(dequantised_slabs, "SLAB_ELEMENTS", SLAB_ELEMENTS)
    products, slabs = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), []
    for outputs, columns in products:
        x, out = torch.empty(600, columns, device="meta"), torch.empty(600, outputs, device="meta")
        dequantised_slabs.multiply_slabs(x, lambda first, _: slabs.append(first), columns, None, out)
    launches = 32 * (2 * len(slabs) - len(products))
    model = shape.MemoryShape.of(parse_model_config(CONFIGS["llama-3.1-8b"], {}))
    planned = model.slab_launches_bytes(Formats(weights=EIGHT_BITS, element_bytes=2, kv_element_bytes=2)) // shape.LAUNCH_BYTES
    assert launches <= planned <= 1.05 * launches


WEIGHTS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int, torch.device], Weight]]] = {
    "int8": (linear_int8.linear_int8, int8_weight),
    "fp8": (linear_fp8.linear_fp8, fp8_weight),
    "int4": (linear_int4.linear_int4, lambda outputs, device: pack_int4(plain(outputs, device), 64)),
}


def check_error(x: torch.Tensor, product: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> None:
    """At most twice that of torch's product with the weight in x's type, as on a card."""
    decoded = reference.dequantise(weight)
    exact = x.double() @ decoded.double().T + (0 if bias is None else bias.double())
    theirs = functional.linear(x, decoded.to(x.dtype), bias)
    errors = [float((each.double() - exact).abs().max()) for each in (product, theirs)]
    assert errors[0] <= TIMES_TORCHS * errors[1], errors


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("outputs", [5, SLAB_ROWS, 2 * SLAB_ROWS + 1, 130])
@pytest.mark.parametrize("count", [TILED_ROWS_MAX + 1, 1000])
def test_many_rows_times_an_int8_weight_are_as_accurate_as_with_torch(
    count: int, outputs: int, dtype: torch.dtype, has_bias: bool, device: torch.device, filled: list[int]
) -> None:
    x, weight = rows(count, dtype, device), int8_weight(outputs, device)
    bias = normal(outputs, dtype=dtype, device=device, seed=7) if has_bias else None
    out = Guarded((count, outputs), dtype, device)
    assert linear_int8.linear_int8(x, weight, bias=bias, out=out.tensor) is out.tensor
    check_error(x, out.check(), weight, bias)
    whole, rest = divmod(outputs, SLAB_ROWS)
    assert filled == [SLAB_ROWS] * whole + [rest] * (rest > 0)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_many_rows_times_other_weights_are_as_accurate_as_with_torch(
    kind: str, dtype: torch.dtype, device: torch.device, filled: list[int]
) -> None:
    multiply, pack = WEIGHTS[kind]
    x, weight = rows(TILED_ROWS_MAX + 1, dtype, device), pack(70, device)
    bias = normal(70, dtype=dtype, device=device, seed=7)
    check_error(x, multiply(x, weight, bias=bias), weight, bias)
    assert len(filled) > 1
    assert sum(filled) == 70


@pytest.mark.parametrize("kind", WEIGHTS)
def test_few_rows_use_no_slabs(kind: str, device: torch.device, filled: list[int]) -> None:
    multiply, pack = WEIGHTS[kind]
    multiply(rows(TILED_ROWS_MAX, torch.float16, device), pack(5, device))
    assert not filled


def test_rows_of_32_bits_and_results_of_another_dtype_use_no_slabs(device: torch.device, filled: list[int]) -> None:
    """No matrix instruction multiplies such rows, and cuBLAS gives no result of another type."""
    x, weight = rows(TILED_ROWS_MAX + 1, torch.float32, device), int8_weight(5, device)
    linear_int8.linear_int8(x, weight)
    linear_fp8.linear_fp8(x.half(), fp8_weight(5, device), out_dtype=torch.float32)
    assert not filled


def test_products_bound_by_the_engine_use_slabs(
    device: torch.device, filled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(quantised_linear._MODULES, "cpu", quantised_linear._MODULES["cuda"])
    quantised_linear._load_function.cache_clear()
    x = rows(TILED_ROWS_MAX + 1, torch.bfloat16, device)
    quantised_linear.bind_int8(int8_weight(5, device), None)(x)
    quantised_linear.bind_fp8(fp8_weight(5, device), None)(x)
    quantised_linear._load_function.cache_clear()
    assert filled == [5, 5]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("pack", [int8_weight, fp8_weight])
def test_slabs_hold_weights_rounded_once(
    pack: Callable[[int, torch.device], Int8Weight | Fp8Weight], dtype: torch.dtype, device: torch.device
) -> None:
    weight = pack(70, device)
    out = Guarded((37, COLUMNS), dtype, device)
    dequantise_rows(weight, 16, out.tensor)
    expected = (weight.values.float() * weight.scales.unsqueeze(1))[16:53].to(dtype)
    if dtype is torch.bfloat16 and device.type == "cpu":  # the interpreter does not round to the nearest: tests/ptx does
        assert_near(out.check(), expected, "pointwise")
    else:
        assert_same(out.check(), expected)
