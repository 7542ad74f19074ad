"""Fused products with 4-bit weights against products with the dequantised weights in float32."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from kernels.quantised_weights import Int4Weight, pack_awq, pack_gptq, pack_int4
from kernels.reference import fused_linear as reference
from kernels.reference import quantised as exact
from kernels.residual_stream import Gate, Stream
from kernels.triton.gate.products.epilogue import LLAMA_8B
from kernels.triton.products import fused_int4, fused_linear
from kernels.triton.products.epilogue import Epilogue
from kernels.triton.products.int4 import OUTPUTS, Int4Tiles, linear_int4
from kernels.triton.products.int4_codes import unpack_instructions
from kernels.triton.products.split_k import arrival_counters
from tests.support.interpreted_bf16 import correct_bf16
from tests.support.kernel_cases import Guarded, normal, padded_rows
from tests.support.kernel_tolerances import assert_near, assert_same

EPS = 1e-6
HALF = torch.float16
pytestmark = pytest.mark.usefixtures("poisoned_partial_sums")
GATES: tuple[Gate | None, ...] = (None, "silu", "gelu_tanh")
SPLITS = pytest.mark.parametrize("splits", [1, 4])
SIZES = pytest.mark.parametrize(("rows", "width", "columns"), [(1, 8, 128), (3, 40, 96), (7, 33, 200), (16, 24, 600)])


def set_splits(monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
    tiles = Int4Tiles(16, 16, num_warps=4, num_stages=3, splits=splits)
    monkeypatch.setattr(fused_int4, "fused_int4_tiles", lambda *_, **__: tiles)


def int4_weight(outputs: int, columns: int, device: torch.device, group_size: int = 128, seed: int = 1) -> Int4Weight:
    values = normal(outputs, columns, dtype=torch.float32, device=device, seed=seed) / math.sqrt(columns)
    return pack_int4(values + 0.01, group_size)


def inputs(
    rows: int, width: int, columns: int, device: torch.device, group_size: int = 128, dtype: torch.dtype = HALF
) -> dict[str, Any]:
    """Operands of `linear_add`, with NaN after each row of x."""
    return {
        "x": padded_rows(normal(rows, columns, dtype=dtype, device=device), -(-columns // 8) * 8 + 8),
        "weight": int4_weight(width, columns, device, group_size),
        "residual": normal(rows, width, dtype=dtype, device=device, seed=2),
        "norm_weight": normal(width, dtype=torch.float32, device=device, seed=3),
    }


def stream_of(rows: int, width: int, device: torch.device, dtype: torch.dtype = HALF) -> Stream:
    """A stream as a preceding product of three tiles leaves it."""
    total = normal(rows, width, dtype=dtype, device=device) * 3
    weighted = (total.float() * normal(width, dtype=torch.float32, device=device, seed=1)).to(dtype)
    squares = torch.stack([part.sum(-1) for part in total.float().square().tensor_split(3, dim=1)])
    return Stream(total, weighted, squares)


@SPLITS
@SIZES
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_a_product_is_added_to_the_stream(
    rows: int, width: int, columns: int, group_size: int, splits: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    set_splits(monkeypatch, splits)
    operands = inputs(rows, width, columns, device, group_size)
    options: dict[str, Any] = {}
    if group_size == 64:
        options = {"alpha": 0.25, "bias": normal(width, dtype=HALF, device=device, seed=4)}
    actual, expected = fused_linear.linear_add(**operands, **options), reference.linear_add(**operands, **options)
    assert_near(actual.total, expected.total, "matmul", scale=2)
    assert_near(actual.weighted, expected.weighted, "matmul", scale=8)
    assert_near(actual.squares.sum(0), actual.total.float().square().sum(-1), "matmul")
    assert not arrival_counters(device).any(), "the counters are zero for the next launch"


@SPLITS
@SIZES
@pytest.mark.parametrize("gate", GATES)
def test_a_product_with_a_fused_norm_matches_the_reference(
    rows: int, width: int, columns: int, gate: Gate | None, splits: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    set_splits(monkeypatch, splits)
    stream, outputs = stream_of(rows, columns, device), width * (1 if gate is None else 2)
    for group_size, bias in ((128, None), (32, normal(outputs, dtype=HALF, device=device, seed=3))):
        weight = int4_weight(outputs, columns, device, group_size)
        actual = fused_linear.normed_linear(stream, weight, EPS, bias=bias, gate=gate)
        assert_near(actual, reference.normed_linear(stream, weight, EPS, bias=bias, gate=gate), "matmul", scale=8)


@pytest.mark.parametrize("columns", [128, 72])
def test_only_the_outputs_are_written(columns: int, device: torch.device) -> None:
    """72 columns of out in tiles of 32: the last tile extends beyond them, into the other half of a gated weight."""
    rows, width = 5, 72
    tiles = Int4Tiles(16, 32, num_warps=4, num_stages=3, splits=1)
    operands = inputs(rows, width, columns, device, 64)
    total, weighted = (Guarded((rows, width), HALF, device) for _ in range(2))
    squares = Guarded((3, rows), torch.float32, device)
    residual_epilogue = Epilogue(
        out=total.tensor, weighted=weighted.tensor, squares_out=squares.tensor,
        residual=operands["residual"], norm_weight=operands["norm_weight"],
    )  # fmt: skip
    fused_int4.launch(operands["x"], operands["weight"], residual_epilogue, tiles)
    expected = reference.linear_add(**operands)
    assert_near(total.check(), expected.total, "matmul", scale=2)
    assert_near(weighted.check(), expected.weighted, "matmul", scale=8)
    assert_near(squares.check().sum(0), total.tensor.float().square().sum(-1), "matmul")
    stream, gated = stream_of(rows, columns, device), Guarded((rows, width), HALF, device)
    weight = int4_weight(2 * width, columns, device, 64)
    norm_epilogue = Epilogue(out=gated.tensor, squares=stream.squares, eps=EPS, gate="silu")
    fused_int4.launch(stream.weighted, weight, norm_epilogue, tiles)
    assert_near(gated.check(), reference.normed_linear(stream, weight, EPS, gate="silu"), "matmul", scale=8)


@SPLITS
@pytest.mark.parametrize("group_size", [32, 128])
def test_a_row_has_the_same_bits_in_any_batch(
    group_size: int, splits: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    set_splits(monkeypatch, splits)
    operands = inputs(16, 48, 300, device, group_size)
    together = fused_linear.linear_add(**operands)
    weight = int4_weight(64, 48, device, 32, seed=9)
    gated = fused_linear.normed_linear(together, weight, EPS, gate="silu")
    for row in (0, 6, 14):
        rows = {name: operands[name][row : row + 2] for name in ("x", "residual")}
        alone = fused_linear.linear_add(**{**operands, **rows})
        for one, other in zip(alone[:2], together[:2], strict=True):
            assert_same(one[0], other[row])
        assert_same(alone.squares[:, 0], together.squares[:, row])
        assert_same(fused_linear.normed_linear(alone, weight, EPS, gate="silu")[0], gated[row])


def test_a_fused_product_has_the_bits_of_the_separate_product(device: torch.device) -> None:
    """Without a norm, and added to a stream of zeros: up to 16 rows have the same bits as from `linear_int4`."""
    operands = inputs(3, 136, 300, device)
    operands["residual"].zero_()
    assert_same(fused_linear.linear_add(**operands).total, linear_int4(operands["x"], operands["weight"]))


def random_words(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=generator).to(torch.int32)


@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_weights_with_any_zero_point_and_order_match_the_reference(ordered: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    order = torch.arange(256) if ordered else torch.randperm(256, generator=generator)
    scales = (torch.rand(4, 16, generator=generator) * 0.01).to(HALF)
    qweight, qzeros, groups = random_words(32, 16, 1), random_words(4, 2, 3), order // 64
    weight = pack_gptq(qweight.to(device), qzeros.to(device), scales.to(device), groups.to(device), 64)
    assert (weight.permutation is None) is ordered
    meaning = exact.dequantise_gptq(qweight, qzeros, scales, groups, 64).to(device)
    stream = stream_of(3, 256, device)
    actual = fused_linear.normed_linear(stream, weight, EPS, gate="silu")
    assert_near(actual, reference.normed_linear(stream, meaning, EPS, gate="silu"), "matmul", scale=8)
    operands = {**inputs(3, 16, 256, device), "weight": weight}
    made_sum, expected = fused_linear.linear_add(**operands), reference.linear_add(**{**operands, "weight": meaning})
    assert_near(made_sum.total, expected.total, "matmul", scale=8)


def test_awq_weights_match_the_reference(device: torch.device) -> None:
    scales = (torch.rand(2, 16, generator=torch.Generator().manual_seed(2)) * 0.01).to(HALF)
    qweight, qzeros = random_words(256, 2, 1), random_words(2, 2, 3)
    weight = pack_awq(qweight.to(device), qzeros.to(device), scales.to(device), 128)
    operands = {**inputs(2, 16, 256, device), "weight": weight}
    meaning = exact.dequantise_awq(qweight, qzeros, scales, 128).to(device)
    expected = reference.linear_add(**{**operands, "weight": meaning})
    assert_near(fused_linear.linear_add(**operands).total, expected.total, "matmul", scale=8)


@pytest.mark.parametrize("group_size", [32, 128])
def test_bfloat16_rows_match_the_reference(group_size: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        correct_bf16(monkeypatch)
    operands = inputs(3, 24, 200, device, group_size, torch.bfloat16)
    assert_near(fused_linear.linear_add(**operands).total, reference.linear_add(**operands).total, "matmul")
    stream, weight = stream_of(3, 200, device, torch.bfloat16), int4_weight(48, 200, device, group_size)
    actual = fused_linear.normed_linear(stream, weight, EPS, gate="silu")
    assert_near(actual, reference.normed_linear(stream, weight, EPS, gate="silu"), "matmul", scale=4)


def test_an_empty_batch_gives_an_empty_result_and_rows_of_32_bits_are_refused(device: torch.device) -> None:
    assert fused_linear.linear_add(**inputs(0, 32, 128, device)).total.shape == (0, 32)
    with pytest.raises(ValueError, match=r"rows of 16 bits, not torch\.float32"):
        fused_linear.linear_add(**inputs(1, 32, 128, device, dtype=torch.float32))


def run_instructions(text: str, register: torch.Tensor) -> torch.Tensor:
    """What the instructions of `unpack_instructions` write to $0, for 32-bit registers in int64."""
    shift = re.fullmatch(
        r"\{ \.reg \.b32 shifted; shr\.u32 shifted, \$1, (\d+); "
        r"lop3\.b32 \$0, shifted, 0x000F000F, (0x[0-9a-f]+), 0xEA; \}",
        text,
    )
    assert shift is not None, f"instructions that this test cannot interpret: {text}"
    shifted = register >> int(shift[1])
    three = {0xF0: shifted, 0xCC: torch.full_like(register, 0x000F000F), 0xAA: torch.full_like(register, int(shift[2], 16))}
    # The immediate of `lop3` is its result for the three columns of the truth table: here (first & second) | third.
    assert (0xF0 & 0xCC) | 0xAA == 0xEA
    return (three[0xF0] & three[0xCC]) | three[0xAA]


@pytest.mark.parametrize(("dtype", "exponent", "offset"), [(torch.bfloat16, 0x4300, 128), (HALF, 0x6400, 1024)])
def test_the_ptx_instructions_unpack_every_word_in_both_register_halves(dtype: torch.dtype, exponent: int, offset: int) -> None:
    """The interpreter cannot execute PTX: what it computes instead is compared with the instructions' meaning."""
    words = torch.arange(1 << 16)
    for run in range(4):
        for register, half in ((words | 0xFFFF0000, 0), (words | 0, 0), (words << 16 | 0xFFFF, 16), (words << 16, 16)):
            actual = (
                (run_instructions(unpack_instructions.fn(run, exponent), register) >> half & 0xFFFF)
                .to(torch.int32)
                .to(torch.int16)
            )
            assert torch.equal(actual.view(dtype).float(), (words >> 4 * run & 15).float() + offset)


def test_tiles_depend_only_on_the_matrix_and_occupy_every_multiprocessor() -> None:
    for outputs, columns in LLAMA_8B.values():
        gated = outputs == 14336
        tiles = fused_int4.fused_int4_tiles(outputs, columns, 132, gated=gated)
        assert tiles.block_m == 16
        assert tiles.block_n * (2 if gated else 1) == OUTPUTS
        assert -(-outputs // tiles.block_n) * tiles.splits >= 132
