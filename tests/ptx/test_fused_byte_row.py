"""PTX of Hopper's fused GEMV with 8-bit weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch

from kernels.quantised_weights import Fp8Weight, Int8Weight, pack_fp8, pack_int8
from kernels.residual_stream import Gate
from kernels.triton import fused_row
from kernels.triton.hopper_gemv import HopperGemvTiles
from tests.support.fused_rows import CPU, check_row
from tests.support.kernel_cases import normal
from tests.support.ptx.card import EmulatedCard

Pack = Callable[[torch.Tensor], Int8Weight | Fp8Weight]
PACKERS: dict[str, Pack] = {"int8": pack_int8, "fp8": pack_fp8, "fp8 as one": partial(pack_fp8, per_row=False)}


@pytest.fixture(autouse=True)
def single_multiprocessor() -> object:
    with mock.patch.object(fused_row, "multiprocessors", return_value=1):
        yield


@pytest.mark.parametrize(
    ("kind", "sizes", "gate", "dtype", "has_bias", "num_warps"),
    [  # both types of rows, products with and without a gate, each number of warps twice
        ("int8", (128, 384, 80), "silu", torch.bfloat16, False, 4),  # width of the stream, columns, outputs of the gate
        ("fp8", (256, 2432, 40), None, torch.bfloat16, True, 8),  # 19 chunks, outputs that are no multiple of 16
        ("fp8", (128, 256, 24), "gelu_tanh", torch.float16, True, 4),
        ("fp8 as one", (128, 384, 80), "silu", torch.bfloat16, False, 8),
    ],
)
def test_a_fused_row_with_8_bit_weights_matches_the_reference(
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

    first_weight, second_weight = pack(width, columns, 1), pack(inner * (2 if gate else 1), width, 2)
    launched = card.launched["fused_byte_row_kernel"]
    with mock.patch.object(fused_row, "hopper_gemv_tiles", return_value=HopperGemvTiles(num_warps)):
        check_row(first_weight, second_weight, sizes, gate, dtype, has_bias=has_bias)
    assert card.launched["fused_byte_row_kernel"] > launched
