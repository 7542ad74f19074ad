"""Fused GEMV with 8-bit weights on Hopper's tensor cores: the products of fused_row.py, with their epilogue.

`fused_row` converts each byte to float32 in two to three instructions and multiplies it with another: half of what a
multiprocessor can issue in the time its bytes take to arrive. Here three to four instructions turn two bytes into a pair of
operands of a matrix instruction, and multiplying these costs next to nothing. A thread loads 16 bytes: contiguous columns of
one output. A dot product may sum its columns in any order if x has the same order; here it is the order in which threads hold
what they loaded, so until the reduction at the end no data moves between threads, nor through shared memory. Warps take chunks
in turn; the first two chunks of each warp are loaded before the wait. Each output belongs to one program.

    int8 as bfloat16   the lower seven bits go under the exponent of 128; 128 is subtracted, or 256 if the sign bit is set
    int8 as float16    all eight bits, the sign bit flipped, go under the exponent of 1024; 1024 + 128 is subtracted
    e4m3               the bits are shifted unchanged into exponent and mantissa, which gives 2^-120 (bfloat16) or 2^-8
                       (float16) of the value, also for zero and subnormal numbers; the scale compensates. A NaN, which
                       weights never contain, would become 480

All products are exact, and summed in float32. To keep sums of small numbers normal, x is multiplied by 2^64 where e4m3 becomes
bfloat16.

Written in Gluon for the same reason as `fused_int4_row`, and tested by executing its PTX (`tests/ptx`). `fused_row` serves all
other cases: other cards, columns that are not whole chunks, matrices of few outputs.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.quantised_weights import CHUNK_COLUMNS, Fp8Weight, Int8Weight
from kernels.triton.card_properties import power_of_two
from kernels.triton.early_launch import early_launch
from kernels.triton.epilogue import Epilogue
from kernels.triton.gluon_epilogue import (
    COPIES,
    OUTPUTS,
    apply_epilogue,
    keep_loads_here,
    load_or,
    load_squares,
    output_rows,
    wait_for_previous,
)
from kernels.triton.hopper_gemv import HopperGemvTiles

WORD_BYTES = gl.constexpr(4)
COLUMNS, WORDS = gl.constexpr(CHUNK_COLUMNS), gl.constexpr(CHUNK_COLUMNS // 4)
"""Columns of a chunk, and its words of four columns."""
RUN = gl.constexpr(64)
"""Contiguous columns that the four threads of an output load together, 16 each."""
X_SCALE = gl.constexpr(2.0**64)
"""Factor on x where e4m3 becomes bfloat16."""


@triton.constexpr_function
def _convert_instructions(is_int8: bool, is_bfloat: bool) -> str:
    """PTX that converts the four bytes of $2 to 16-bit floats: the first and the third in $0, the second and the fourth in
    $1."""
    if is_int8 and is_bfloat:
        asm = (
            "lop3.b32 low, {0}, 0x007F007F, 0x43004300, 0xEA; lop3.b32 sign, {0}, 0x00800080, 0x43004300, 0xEA; "
            "sub.rn.bf16x2 {1}, low, sign;"
        )
        return "{ .reg .b32 odd, low, sign; shr.b32 odd, $2, 8; " + asm.format("$2", "$0") + asm.format("odd", "$1") + " }"
    if is_int8:
        asm = "lop3.b32 low, {0}, 0x00FF00FF, 0x64806480, 0x6A; sub.rn.f16x2 {1}, low, both;"
        first = "mov.b32 both, 0x64806480; shr.b32 odd, $2, 8; "
        return "{ .reg .b32 odd, low, both; " + first + asm.format("$2", "$0") + asm.format("odd", "$1") + " }"
    shift, mask = (4, "0x07F007F0") if is_bfloat else (1, "0x3F803F80")
    asm = "lop3.b32 {1}, {0}, 0x80008000, {2}, 0xEA;"
    even = f"shl.b32 even, $2, 8; shl.b32 low, $2, {8 - shift}; and.b32 low, low, {mask}; "
    odd = f"shr.b32 high, $2, {shift}; and.b32 high, high, {mask}; "
    both = asm.format("$2", "$1", "high") + asm.format("even", "$0", "low")  # $2 may be where $0 is
    return "{ .reg .b32 even, low, high; " + even + odd + both + " }"


@triton.constexpr_function
def _scale_correction(is_int8: bool, is_bfloat: bool) -> float:
    """The factor by which sums of the converted weights and the scaled x are too small."""
    return 1.0 if is_int8 else 2.0**56 if is_bfloat else 2.0**8


@gluon.jit
def _weight_operand(words, IS_INT8: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Converts words: [WARPS, outputs, WORDS] as loaded to the left operand: [WARPS, outputs, COLUMNS] of DTYPE.

    The columns of a run are split by thread of four, instruction, half of the instruction's columns, and pair, and permuted
    to the instruction's order."""
    INSTRUCTIONS: gl.constexpr = _convert_instructions(IS_INT8, gl.bfloat16 == DTYPE)
    converted = gl.inline_asm_elementwise(INSTRUCTIONS, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    pairs = gl.join(converted[0], converted[1])
    elements = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    permuted = elements.reshape([words.shape[0], words.shape[1], COLUMNS // RUN, 4, 4, 2, 2]).permute([0, 1, 2, 4, 5, 3, 6])
    return gl.convert_layout(permuted.reshape([words.shape[0], words.shape[1], COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.jit
def _x_operand(row, LAYOUT: gl.constexpr):
    """Turns row: [WARPS, COPIES, COLUMNS] as loaded into the right operand: [WARPS, COLUMNS, COPIES].

    Columns are in the order of `_weight_operand`: the first and the third of four columns are a pair, as are the second and the
    fourth."""
    reshaped = row.reshape([row.shape[0], COPIES, COLUMNS // RUN, 4, 4, 2, 2])
    ordered = reshaped.permute([0, 2, 4, 6, 3, 5, 1]).reshape([row.shape[0], COLUMNS, COPIES])
    return gl.convert_layout(ordered, LAYOUT, assert_trivial=True)


@gluon.jit
def _accumulate_chunk(acc, words, x, columns, mask, IS_INT8: gl.constexpr):
    """Adds the products of each warp's chunk to acc. columns: [WARPS, COLUMNS], of x; mask: whether the chunk exists"""
    WARPS: gl.constexpr = acc.shape[0]
    X_LAYOUT: gl.constexpr = columns.type.layout.parent
    ACC_LAYOUT: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = x.dtype.element_ty
    x_values = gl.load(x + columns, mask=mask, other=0.0)
    if gl.bfloat16 == DTYPE and not IS_INT8:
        x_values = x_values * X_SCALE
    x_values, _ = gl.broadcast(x_values[:, None, :], gl.full([WARPS, COPIES, COLUMNS], 0.0, DTYPE, layout=X_LAYOUT))
    weight_operand = _weight_operand(words, IS_INT8, DTYPE, gl.DotOperandLayout(0, ACC_LAYOUT, 2))
    return mma_v2(weight_operand, _x_operand(x_values, gl.DotOperandLayout(1, ACC_LAYOUT, 2)), acc)


@gluon.jit
def _load_chunk(weight_ptrs, mask, chunk, num_chunks, warp):
    """Loads the words of one chunk per warp, from `chunk` on, zeros beyond the last: [WARPS, outputs, WORDS]"""
    chunk_mask = mask & (chunk + warp < num_chunks)
    return gl.load(weight_ptrs + chunk * WORDS, mask=chunk_mask[:, :, None], other=0, eviction_policy="evict_first")


@gluon.jit(do_not_specialize=["num_squares"])
def fused_byte_row_kernel(
    x, weight, weight_scales, bias, squares, residual, norm_weight, out, weighted, squares_out,
    N, K, num_squares, eps, alpha,
    GATE: gl.constexpr, COLUMN_SCALES: gl.constexpr, SQUARES_BLOCK: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Program (tile): OUTPUTS columns of out, from both halves of the weight if it is gated."""
    HALVES: gl.constexpr = 1 if GATE is None else 2
    IS_INT8: gl.constexpr = gl.int8 == weight.dtype.element_ty
    IS_BFLOAT: gl.constexpr = gl.bfloat16 == x.dtype.element_ty
    WORDS_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    X_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    tile, num_chunks = gl.program_id(0), K // COLUMNS
    # The weights of a chunk for each warp, and the epilogue's data of each output in the layout of the sums.
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS_LAYOUT)))[:, None]
    row, row_mask = output_rows(tile, N, HALVES, gl.SliceLayout(0, gl.SliceLayout(2, WORDS_LAYOUT)))
    mask = row_mask[None, :]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS_LAYOUT)))[None, None, :]
    offset = row.to(gl.int64)[None, :] * (K // WORD_BYTES) + warp * WORDS
    weight_ptrs = weight.to(gl.pointer_type(gl.int32), bitcast=True) + offset[:, :, None] + word
    outputs, output_mask = output_rows(tile, N, HALVES, gl.SliceLayout(1, gl.SliceLayout(0, ACC_LAYOUT)))
    even_words = _load_chunk(weight_ptrs, mask, 0, num_chunks, warp)
    odd_words = _load_chunk(weight_ptrs, mask, WARPS, num_chunks, warp)
    scale = load_or(weight_scales, outputs if COLUMN_SCALES else outputs * 0, output_mask, 1.0)
    bias_values = load_or(bias, outputs, output_mask, 0.0)
    next_weights = load_or(norm_weight, outputs, output_mask, 0.0)
    wait_for_previous(EARLY)
    row_squares = load_squares(squares, num_squares, SQUARES_BLOCK, WARPS)
    residual_values = load_or(residual, outputs, output_mask, 0.0)
    x_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, X_LAYOUT)))[:, None]
    column = x_warp * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, X_LAYOUT)))[None, :]
    acc = gl.zeros([WARPS, HALVES * OUTPUTS, COPIES], gl.float32, layout=ACC_LAYOUT)
    # Unrolled by two, so that no registers are moved between iterations.
    for chunk in range(0, num_chunks, 2 * WARPS):
        acc = _accumulate_chunk(acc, even_words, x + chunk * COLUMNS, column, chunk + x_warp < num_chunks, IS_INT8)
        even_words = _load_chunk(weight_ptrs, mask, chunk + 2 * WARPS, num_chunks, warp)
        keep_loads_here()  # else they come behind the odd chunk, and nothing is in flight while that is multiplied
        acc = _accumulate_chunk(
            acc, odd_words, x + (chunk + WARPS) * COLUMNS, column, chunk + WARPS + x_warp < num_chunks, IS_INT8
        )
        odd_words = _load_chunk(weight_ptrs, mask, chunk + 3 * WARPS, num_chunks, warp)
    product = gl.max(gl.sum(acc, 0), 1) * (scale * _scale_correction(IS_INT8, IS_BFLOAT))  # all copies of x have the same sum
    apply_epilogue(
        product, outputs, output_mask, bias_values, squares, row_squares, residual, residual_values, norm_weight, next_weights,
        out, weighted, squares_out, tile, N, K, eps, alpha, GATE,
    )  # fmt: skip


def launch_byte_row(x: torch.Tensor, weight: Int8Weight | Fp8Weight, epilogue: Epilogue, tiles: HopperGemvTiles) -> None:
    """As `fused_row.launch`, for weights of 8 bits. x: [1, K] of 16 bits, K in whole chunks.

    2 · 8 · N · K operations on tensor cores. Outputs beyond N are masked. Reads N·K bytes of weights once; scales and
    accumulates in float32, in an order that depends on K alone.
    """
    assert tiles.block_n == OUTPUTS.value, "the kernel sums the squares of OUTPUTS outputs"
    num_columns, outputs = x.shape[1], epilogue.out.shape[1]
    fused_byte_row_kernel[(triton.cdiv(outputs, tiles.block_n),)](
        x, weight.values, weight.scales, *epilogue.tensors,
        outputs, num_columns, epilogue.num_squares, epilogue.eps, epilogue.alpha,
        GATE=epilogue.gate, COLUMN_SCALES=weight.scales.numel() > 1, SQUARES_BLOCK=power_of_two(epilogue.num_squares),
        WARPS=tiles.num_warps, num_warps=tiles.num_warps, maxnreg=tiles.registers_max, **early_launch(x.device, 1),
    )  # fmt: skip
