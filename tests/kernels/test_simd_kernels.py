"""Compiled CPU kernels against their references: awkward shapes, poisoned caches, one thread and two."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels.reference import norm as reference_norm
from kernels.reference import rope_and_cache as reference_rope
from kernels.simd import table as simd_table
from kernels.simd.linear import COLUMNS, DEPTH, WIDE_COLUMNS, WIDE_OUTPUTS_MIN
from kernels.simd.threads import WORK_PER_THREAD, pool
from kernels.torch import table as plain_table

OPERATIONS = simd_table.OPERATIONS

# Sums of up to a few hundred float32 products in another order: a few units in the last place of their largest term.
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 2e-5, 2e-6
SENTINEL = -7.0


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE)


def test_the_number_of_threads_follows_the_work_up_to_torchs_limit(threads: int) -> None:
    assert pool().num_threads(2 * WORK_PER_THREAD - 1) == 1
    assert pool().num_threads(100 * WORK_PER_THREAD) == threads


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 9, 15, 16, 17, 33])
@pytest.mark.parametrize(
    ("outputs", "columns"),
    [
        (1, 1),
        (COLUMNS, 16),
        (COLUMNS + 1, 33),
        (3 * COLUMNS - 1, 257),
        (640, 130),
        (WIDE_OUTPUTS_MIN, 65),
        (WIDE_OUTPUTS_MIN + WIDE_COLUMNS - 1, 18),
    ],
)
def test_a_product_equals_its_definition(num_rows: int, outputs: int, columns: int, threads: int) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(outputs, columns), torch.randn(outputs), torch.randn(num_rows, columns)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(OPERATIONS.pack_linear(weight, None)(x), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(OPERATIONS.pack_linear(weight, bias)(x), expected + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("outputs", [COLUMNS + 5, WIDE_OUTPUTS_MIN + 5])
@pytest.mark.parametrize("num_rows", [7, 11, 30])
def test_a_product_with_more_columns_than_one_pass_matches_the_reference(outputs: int, num_rows: int, threads: int) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(outputs, 2 * DEPTH + 3), torch.randn(num_rows, 2 * DEPTH + 3)
    expected = (x.double() @ weight.double().T).float()
    torch.testing.assert_close(OPERATIONS.pack_linear(weight, None)(x), expected, rtol=1e-5, atol=1e-3)


def test_a_product_does_not_read_its_weight_again() -> None:
    weight, x = torch.ones(40, 8), torch.ones(2, 8)
    multiply = OPERATIONS.pack_linear(weight, None)
    weight.fill_(math.nan)
    assert torch.equal(multiply(x), torch.full((2, 40), 8.0))


def test_a_product_is_as_exact_as_torchs() -> None:
    torch.manual_seed(3)
    weight, x = torch.randn(512, 768), torch.randn(16, 768)
    exact = x.double() @ weight.double().T
    ours = (OPERATIONS.pack_linear(weight, None)(x) - exact).abs().mean()
    torchs = (torch.nn.functional.linear(x, weight) - exact).abs().mean()
    assert ours <= 2 * torchs


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 300])
@pytest.mark.parametrize("size", [1, 16, 66, 130, 768])
def test_norms_equal_their_definitions_and_leave_their_inputs_alone(num_rows: int, size: int, threads: int) -> None:
    torch.manual_seed(4)
    x, residual, weight, other = (
        torch.randn(num_rows, size) * 9,
        torch.randn(num_rows, size),
        torch.randn(size),
        torch.randn(size),
    )
    before = x.clone(), residual.clone()
    assert_near(OPERATIONS.rms_norm(x, weight, 1e-6), reference_norm.rms_norm(x, weight, 1e-6))
    for weights in ((weight, None), (None, None), (weight, other), (None, other)):
        kind: dict[str, Any] = {"alpha": 0.7, "branch_weight": weights[1]}
        found = OPERATIONS.add_rms_norm(x, residual, weights[0], 1e-6, **kind)
        expected = reference_norm.add_rms_norm(x, residual, weights[0], 1e-6, **kind)
        for actual, wanted in zip(found, expected, strict=True):
            assert_near(actual, wanted)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("num_rows", [1, 15, 17, 200])
@pytest.mark.parametrize("size", [1, 16, 33, 768])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates_equal_their_definitions(name: str, num_rows: int, size: int, threads: int) -> None:
    torch.manual_seed(5)
    gate_up = torch.randn(num_rows, 2 * size) * 9
    before = gate_up.clone()
    gate, up = before.double().chunk(2, dim=-1)  # in float32 the reference's 1 + tanh loses digits far below zero
    functional = torch.nn.functional
    activated = functional.silu(gate) if name == "silu_mul" else functional.gelu(gate, approximate="tanh")
    assert_near(getattr(OPERATIONS, name)(gate_up), (activated * up).float())
    assert torch.equal(gate_up, before)


def test_a_gate_is_accurate_over_its_whole_range_and_keeps_nan() -> None:
    values = torch.tensor([-1e30, -1000.0, -88.5, -87.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 87.0, 89.0, 1e30, math.inf, math.nan])
    gate_up = torch.cat((values, torch.ones(len(values))))[None]
    expected = torch.nn.functional.silu(values.double()).float()
    torch.testing.assert_close(OPERATIONS.silu_mul(gate_up)[0], expected, rtol=1e-6, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize("tokens", [1, 15, 17, 130])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary_dim"), [(4, 2, 64, 64), (5, 1, 80, 32), (2, 2, 12, 12), (3, 1, 96, 96)]
)
@pytest.mark.parametrize("norm", ["none", "head", "full"])
def test_queries_and_keys_are_rotated_and_only_their_slots_are_written(
    tokens: int, heads: int, kv_heads: int, size: int, rotary_dim: int, norm: str, threads: int
) -> None:
    torch.manual_seed(6)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, size)
    angles = torch.rand(tokens, 1, rotary_dim // 2) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    slots = torch.randperm(160)[:tokens]
    slots[0] = -1
    cache = torch.full((10, 16, 2, kv_heads, size), SENTINEL)
    options: dict[str, Any] = {"num_kv_heads": kv_heads, "rotary_dim": rotary_dim, "eps": 1e-5}
    if norm != "none":
        widths = (size, size) if norm == "head" else (heads * size, kv_heads * size)
        options |= {"q_weight": torch.randn(widths[0]), "k_weight": torch.randn(widths[1])}
    expected, expected_cache = qkv.clone(), cache.clone()
    reference_rope.rope_and_cache(expected, cos, sin, expected_cache, slots, **options)
    OPERATIONS.rope_and_cache(qkv, cos, sin, cache, slots, **options)
    assert_near(qkv, expected)
    assert_near(cache, expected_cache)


def test_a_cache_in_e4m3_is_written_as_torch_writes_it() -> None:
    torch.manual_seed(7)
    qkv, angles = torch.randn(3, 6, 16), torch.rand(3, 1, 8)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)
    caches = [torch.zeros(2, 16, 2, 2, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    for operations, cache in zip((OPERATIONS, plain_table.OPERATIONS), caches, strict=True):
        slots, scales = torch.tensor([3, 17, 0]), torch.tensor([0.5, 2.0])
        operations.rope_and_cache(qkv.clone(), cos, sin, cache, slots, num_kv_heads=2, rotary_dim=16, kv_scales=scales)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
