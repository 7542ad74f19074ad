"""Fused products of up to 16 rows with 8-bit weights on Hopper's tensor cores: those of fused_linear.py, with their epilogue.

`fused_row` converts each byte to float32 in two to three instructions and multiplies it with another: half of what a
multiprocessor can issue in the time its bytes take to arrive. Here three to four instructions turn two bytes into a pair of
operands of a matrix instruction, and multiplying these by 8 rows costs next to nothing: by copies of a single row, by up to 8,
or with two instructions by up to 16. A thread loads 16 bytes: contiguous columns of one output. A dot product may sum its
columns in any order if x has the same order; here it is the order in which threads hold what they loaded, so until the
reduction at the end no data moves between threads, nor through shared memory. Warps take chunks in turn; the first two chunks
of each warp are loaded before the wait. Each output belongs to one program, which reads all of x.

    int8 as bfloat16   the lower seven bits go under the exponent of 128; 128 is subtracted, or 256 if the sign bit is set
    int8 as float16    all eight bits, the sign bit flipped, go under the exponent of 1024; 1024 + 128 is subtracted
    e4m3               the bits are shifted unchanged into exponent and mantissa, which gives 2^-120 (bfloat16) or 2^-8
                       (float16) of the value, also for zero and subnormal numbers; the scale compensates. A NaN, which
                       weights never contain, would become 480

All products are exact, and summed in float32. To keep sums of small numbers normal, x is multiplied by 2^64 where e4m3 becomes
bfloat16.

Written in Gluon for the same reason as `fused_int4_rows`, and tested by executing its PTX (`tests/ptx`). `hopper_tiles` chooses
what it serves: other cards, columns that are not whole chunks and matrices of few outputs have `fused_row`, `fused_linear` and
`tiles`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.quantised_weights import CHUNK_COLUMNS, Fp8Weight, Int8Weight
from kernels.triton.launching.card_properties import power_of_two
from kernels.triton.launching.early_launch import early_launch
from kernels.triton.products.epilogue import Epilogue
from kernels.triton.products.gluon_epilogue import (
    OPERAND_ROWS,
    add_warps,
    apply_epilogue,
    keep_loads_here,
    load_column,
    load_or,
    load_squares,
    output_rows,
    row_offsets,
    sums_layout,
    wait_for_previous,
)
from kernels.triton.products.hopper_tiles import HopperTiles

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
    """Converts a run's words: [WARPS, outputs, RUN / 4] as loaded to the left operand: [WARPS, outputs, RUN] of DTYPE.

    The columns of a run are split by thread of four, instruction, half of the instruction's columns, and pair, and permuted
    to the instruction's order."""
    INSTRUCTIONS: gl.constexpr = _convert_instructions(IS_INT8, gl.bfloat16 == DTYPE)
    converted = gl.inline_asm_elementwise(INSTRUCTIONS, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    pairs = gl.join(converted[0], converted[1])
    elements = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    permuted = elements.reshape([words.shape[0], words.shape[1], 4, 4, 2, 2]).permute([0, 1, 3, 4, 2, 5])
    return gl.convert_layout(permuted.reshape([words.shape[0], words.shape[1], RUN]), LAYOUT, assert_trivial=True)


@gluon.jit
def _x_operand(x, LAYOUT: gl.constexpr):
    """Turns a run of x: [WARPS, rows, RUN] as loaded into the right operand: [WARPS, RUN, rows].

    Columns are in the order of `_weight_operand`: the first and the third of four columns are a pair, as are the second and the
    fourth."""
    ordered = x.reshape([x.shape[0], x.shape[1], 4, 4, 2, 2]).permute([0, 3, 5, 2, 4, 1])
    return gl.convert_layout(ordered.reshape([x.shape[0], RUN, x.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.jit
def _accumulate_run(acc, words, x, offsets, mask, IS_INT8: gl.constexpr):
    X_LAYOUT: gl.constexpr = offsets.type.layout
    ACC_LAYOUT: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = x.dtype.element_ty
    x_values = gl.load(x + offsets, mask=mask, other=0.0)
    if gl.bfloat16 == DTYPE and not IS_INT8:
        x_values = x_values * X_SCALE
    x_values, _ = gl.broadcast(x_values, gl.full([acc.shape[0], acc.shape[2], RUN], 0.0, DTYPE, layout=X_LAYOUT))
    weight_operand = _weight_operand(words, IS_INT8, DTYPE, gl.DotOperandLayout(0, ACC_LAYOUT, 2))
    return mma_v2(weight_operand, _x_operand(x_values, gl.DotOperandLayout(1, ACC_LAYOUT, 2)), acc)


@gluon.jit
def _accumulate_chunk(acc, words, x, offsets, mask, IS_INT8: gl.constexpr):
    """Adds the products of each warp's chunk to acc, a run at a time. offsets: [WARPS, rows or 1, RUN], of x; mask: whether the
    chunk exists"""
    runs = words.reshape([words.shape[0], words.shape[1], COLUMNS // RUN, RUN // 4]).permute([0, 1, 3, 2])
    first, second = runs.split()
    acc = _accumulate_run(acc, first, x, offsets, mask, IS_INT8)
    if acc.shape[2] > OPERAND_ROWS:
        keep_loads_here()  # else the second run's x comes before the first run's products, and takes too many registers
    return _accumulate_run(acc, second, x + RUN, offsets, mask, IS_INT8)


@gluon.jit
def _load_chunk(weight_ptrs, mask, chunk, num_chunks, warp):
    """Loads the words of one chunk per warp, from `chunk` on, zeros beyond the last: [WARPS, outputs, WORDS]"""
    chunk_mask = mask & (chunk + warp < num_chunks)
    return gl.load(weight_ptrs + chunk * WORDS, mask=chunk_mask[:, :, None], other=0, eviction_policy="evict_first")


@gluon.jit(do_not_specialize=["M", "num_squares"])
def fused_byte_rows_kernel(
    x, weight, weight_scales, bias, squares, residual, norm_weight, out, weighted, squares_out,
    M, N, K, x_stride, num_squares, eps, alpha,
    GATE: gl.constexpr, SQUARES_BLOCK: gl.constexpr, NUM_ROWS: gl.constexpr,
    OUTPUTS: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Program (tile): OUTPUTS columns of out, from both halves of the weight if it is gated. NUM_ROWS: 1, or M rounded up to a
    multiple of OPERAND_ROWS."""
    HALVES: gl.constexpr = 1 if GATE is None else 2
    IS_INT8: gl.constexpr = gl.int8 == weight.dtype.element_ty
    IS_BFLOAT: gl.constexpr = gl.bfloat16 == x.dtype.element_ty
    WORDS_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    X_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    SUMS_LAYOUT: gl.constexpr = sums_layout(OUTPUTS, WARPS)
    PADDED_ROWS: gl.constexpr = NUM_ROWS if NUM_ROWS > 1 else OPERAND_ROWS
    tile, num_chunks = gl.program_id(0), K // COLUMNS
    # The weights of a chunk for each warp, and the epilogue's data of each output in the layout of the sums.
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS_LAYOUT)))[:, None]
    row, row_mask = output_rows(tile, N, HALVES, OUTPUTS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS_LAYOUT)))
    mask = row_mask[None, :]
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS_LAYOUT)))[None, None, :]
    offset = row.to(gl.int64)[None, :] * (K // WORD_BYTES) + warp * WORDS
    weight_ptrs = weight.to(gl.pointer_type(gl.int32), bitcast=True) + offset[:, :, None] + word
    outputs, output_mask = output_rows(tile, N, HALVES, OUTPUTS, gl.SliceLayout(1, SUMS_LAYOUT))
    rows = gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(0, SUMS_LAYOUT))
    even_words = _load_chunk(weight_ptrs, mask, 0, num_chunks, warp)
    odd_words = _load_chunk(weight_ptrs, mask, WARPS, num_chunks, warp)
    scale = load_or(weight_scales, outputs, output_mask, 1.0)[:, None]
    bias_values = load_column(bias, outputs, output_mask)
    next_weights = load_column(norm_weight, outputs, output_mask)
    wait_for_previous(EARLY)
    row_squares = load_squares(squares, M, num_squares, SQUARES_BLOCK, NUM_ROWS, WARPS) if NUM_ROWS == 1 else 0.0
    residual_mask = output_mask[:, None] & (rows < M)[None, :]
    residual_values = load_or(residual, rows[None, :] * N + outputs[:, None], residual_mask, 0.0)
    x_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X_LAYOUT)))[:, None, None]
    x_column = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(1, X_LAYOUT)))[None, None, :]
    x_offset = x_warp * COLUMNS + x_column + row_offsets(M, x_stride, NUM_ROWS, X_LAYOUT)
    acc = gl.zeros([WARPS, HALVES * OUTPUTS, PADDED_ROWS], gl.float32, layout=ACC_LAYOUT)
    # Unrolled by two, so that no registers are moved between iterations.
    for chunk in range(0, num_chunks, 2 * WARPS):
        acc = _accumulate_chunk(acc, even_words, x + chunk * COLUMNS, x_offset, chunk + x_warp < num_chunks, IS_INT8)
        even_words = _load_chunk(weight_ptrs, mask, chunk + 2 * WARPS, num_chunks, warp)
        keep_loads_here()  # else they come behind the odd chunk, and nothing is in flight while that is multiplied
        acc = _accumulate_chunk(
            acc, odd_words, x + (chunk + WARPS) * COLUMNS, x_offset, chunk + WARPS + x_warp < num_chunks, IS_INT8
        )
        odd_words = _load_chunk(weight_ptrs, mask, chunk + 3 * WARPS, num_chunks, warp)
    if NUM_ROWS > 1:  # so many that they would take registers of the loop
        row_squares = load_squares(squares, M, num_squares, SQUARES_BLOCK, NUM_ROWS, WARPS)
    product = add_warps(acc, NUM_ROWS, SUMS_LAYOUT) * (scale * _scale_correction(IS_INT8, IS_BFLOAT))
    apply_epilogue(
        product, outputs, output_mask, rows, rows < M, bias_values, squares, row_squares, residual, residual_values,
        norm_weight, next_weights, out, weighted, squares_out, tile, M, N, K, eps, alpha, OUTPUTS, GATE,
    )  # fmt: skip


def launch_byte_rows(x: torch.Tensor, weight: Int8Weight | Fp8Weight, epilogue: Epilogue, tiles: HopperTiles) -> None:
    """As `fused_linear.py`, for weights of 8 bits. x: [M, K] of 16 bits, M ≤ 16, K in whole chunks.

    2 · N · K operations on tensor cores for M rounded up to a multiple of 8. Rows beyond M and outputs beyond N are masked.
    Reads N·K bytes of weights once, and 2·M·K bytes of x in each program; scales and accumulates in float32, in an order that
    depends on K alone.
    """
    assert weight.values.is_contiguous(), "the weight is contiguous"
    (num_rows, num_columns), outputs = x.shape, epilogue.out.shape[1]
    fused_byte_rows_kernel[(triton.cdiv(outputs, tiles.block_n),)](
        x, weight.values, weight.scales, *epilogue.tensors,
        num_rows, outputs, num_columns, x.stride(0) if num_rows > 1 else num_columns,
        epilogue.num_squares, epilogue.eps, epilogue.alpha,
        GATE=epilogue.gate, SQUARES_BLOCK=power_of_two(epilogue.num_squares),
        NUM_ROWS=tiles.num_rows, OUTPUTS=tiles.block_n, WARPS=tiles.num_warps, num_warps=tiles.num_warps,
        maxnreg=tiles.registers_max, **early_launch(x.device, num_rows),
    )  # fmt: skip
