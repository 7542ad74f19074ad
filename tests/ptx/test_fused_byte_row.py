"""Products of one row with weights of 8 bits as machine-level code: Hopper's own kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch

from kernels.quantised_weights import Fp8Weight, Int8Weight, pack_fp8, pack_int8
from kernels.reference import fused_linear as reference
from kernels.residual_stream import Gate
from kernels.triton import fused_row
from kernels.triton.fused_linear import linear_add, normed_linear
from kernels.triton.fused_row import HopperRowTiles
from tests.support.kernel_cases import normal, padded_rows
from tests.support.kernel_tolerances import assert_near
from tests.support.ptx.card import EmulatedCard

CPU = torch.device("cpu")
EPS = 1e-6
Pack = Callable[[torch.Tensor], Int8Weight | Fp8Weight]
PACKERS: dict[str, Pack] = {"int8": pack_int8, "fp8": pack_fp8, "fp8 as one": partial(pack_fp8, per_row=False)}


@pytest.fixture(autouse=True)
def few_multiprocessors() -> object:
    with mock.patch.object(fused_row, "multiprocessors", return_value=1):
        yield


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize(
    ("sizes", "gate", "dtype", "has_bias"),
    [
        ((128, 384, 80), "silu", torch.bfloat16, False),  # width of the stream, columns before it, columns behind the gate
        ((256, 2432, 40), None, torch.bfloat16, True),  # 19 chunks, outputs that are no multiple of 16
        ((128, 256, 24), "gelu_tanh", torch.float16, True),
    ],
)
def test_a_row_is_multiplied(
    kind: str,
    sizes: tuple[int, int, int],
    gate: Gate | None,
    dtype: torch.dtype,
    has_bias: bool,
    num_warps: int,
    card: EmulatedCard,
) -> None:
    width, columns, inner = sizes

    def pack(outputs: int, count: int, seed: int) -> Int8Weight | Fp8Weight:
        weight = normal(outputs, count, dtype=torch.float32, device=CPU, seed=seed) / count**0.5
        return PACKERS[kind](weight + 0.01)

    before, behind = pack(width, columns, 1), pack(inner * (2 if gate else 1), width, 2)
    x = padded_rows(normal(1, columns, dtype=dtype, device=CPU) + 0.5, columns + 16)
    made_of = partial(normal, dtype=dtype, device=CPU)
    given = x, before, made_of(1, width, seed=3), made_of(width, seed=4)
    biases = made_of(width, seed=5), made_of(inner * (2 if gate else 1), seed=6)
    launched = card.launched["fused_byte_row_kernel"]
    with mock.patch.object(fused_row, "hopper_row_tiles", return_value=HopperRowTiles(num_warps)):
        made = linear_add(*given, alpha=0.5, bias=biases[0] if has_bias else None)
        product = normed_linear(made, behind, EPS, gate=gate, bias=biases[1] if has_bias else None)
    assert card.launched["fused_byte_row_kernel"] > launched
    expected = reference.linear_add(*given, alpha=0.5, bias=biases[0] if has_bias else None)
    assert_near(made.total, expected.total, "matmul")
    assert_near(made.weighted, expected.weighted, "matmul", scale=4)
    assert_near(made.squares.sum(0), made.total.float().square().sum(-1), "matmul")
    exact = reference.normed_linear(made, behind, EPS, gate=gate, bias=biases[1] if has_bias else None)
    assert_near(product, exact, "matmul", scale=8)
