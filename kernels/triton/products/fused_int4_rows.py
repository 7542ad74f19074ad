"""Fused products of up to 16 rows with 4-bit weights on Hopper: those of fused_int4.py, with their epilogue.

`fused_int4` stages words in shared memory, splits the columns among programs, reduces the splits' sums, and loads nothing
before its wait: 5 to 6 µs of each product on an H200 are not spent on its bytes. Here a thread loads 16 bytes that are its own
fragment of a matrix operand: eight words of one output, the codes of columns 8 t … 8 t + 7 of four runs. A dot product may sum
its columns in any order if x has the same order; here it is the order in which threads hold what they loaded, so no data moves
between threads. The instruction multiplies 8 rows: copies of a single one, or up to 8; two of them up to 16. Warps take chunks
in turn; the first two chunks of each warp are loaded before the wait. Each output belongs to one program, which reads all of x.

Codes stay biased by their exponent, as 128 + code (bfloat16) or 16 + code (float16). The bias adds the same multiple of the sum
of x to the sum of a group; the sum of x is a product with ones. All products are exact, and summed in float32: cancellation
costs at most 6e-5 of a result where all of x has one sign (docs/log/gpu-kernels.md), a twentieth of its rounding to bfloat16.

Triton's language does not control which elements each thread holds, so this is written in Gluon, its lower level
(`triton.experimental`). The interpreter cannot run that, so tests execute its PTX (`tests/ptx`). `fused_int4` and
`int4` serve everything else: smaller groups, other cards.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.quantised_weights import CHUNK_COLUMNS, CHUNK_RUNS, RUN_COLUMNS, Int4Weight
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
from kernels.triton.products.int4_codes import unpack_instructions

COLUMNS, RUN, RUNS = gl.constexpr(CHUNK_COLUMNS), gl.constexpr(RUN_COLUMNS), gl.constexpr(CHUNK_RUNS)
INSTRUCTION_OUTPUTS = gl.constexpr(16)
"""Rows of a matrix instruction's left operand."""
PAIRS = gl.constexpr(RUN_COLUMNS // 2)
"""Pairs of words of one output and chunk, one per register."""


@gluon.jit
def _mma_operand(values, LAYOUT: gl.constexpr):
    """Turns values: [WARPS, outputs or rows, RUN] as loaded into the left or the right operand of two matrix instructions.

    The columns of a run are split by thread of four, instruction, half of the instruction's columns, and pair."""
    WARPS: gl.constexpr = values.shape[0]
    COUNT: gl.constexpr = values.shape[1]
    reshaped = values.reshape([WARPS, COUNT, 4, 2, 2, 2])
    if LAYOUT.operand_index == 0:
        ordered = reshaped.permute([0, 1, 3, 4, 2, 5]).reshape([WARPS, COUNT, RUN])
    else:
        ordered = reshaped.permute([0, 3, 4, 2, 5, 1]).reshape([WARPS, RUN, COUNT])
    return gl.convert_layout(ordered, LAYOUT, assert_trivial=True)


@triton.constexpr_function
def _run_instructions(run: int, is_bfloat: bool) -> str:
    """PTX that unpacks a run's codes of two words. In float16 they go to the upper end of the mantissa, under a smaller
    exponent."""
    if is_bfloat:
        instructions: str = unpack_instructions(run, 0x4300)
        return instructions
    shift = f"shl.b32 shifted, $1, {6 - 4 * run}" if run < 2 else f"shr.u32 shifted, $1, {4 * run - 6}"
    return f"{{ .reg .b32 shifted; {shift}; lop3.b32 $0, shifted, 0x03C003C0, 0x4C004C00, 0xEA; }}"


@gluon.jit
def _unpack_run(pairs, RUN_INDEX: gl.constexpr, DTYPE: gl.constexpr):
    """Unpacks the biased codes of one run. pairs: [WARPS, outputs, PAIRS] int32 → [WARPS, outputs, RUN]"""
    words = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)).reshape([pairs.shape[0], pairs.shape[1], RUN])
    INSTRUCTIONS: gl.constexpr = _run_instructions(RUN_INDEX, gl.bfloat16 == DTYPE)
    biased = gl.inline_asm_elementwise(INSTRUCTIONS, "=r,r", [words], dtype=gl.int16, is_pure=True, pack=2)
    return biased.to(DTYPE, bitcast=True)


@gluon.jit
def _add_scaled(acc, chunk_sum, x_sum, scale_zero, BFLOAT_SCALES: gl.constexpr, DTYPE: gl.constexpr):
    """acc + scale · Σ (code - zero) · x. chunk_sum: Σ biased code · x; x_sum: Σ x"""
    if gl.bfloat16 == DTYPE:
        zero = (scale_zero & -65536 | 0x43000000).to(gl.float32, bitcast=True)  # 128 + zero
    else:
        zero = ((scale_zero >> 16 << 19) + 0x41800000).to(gl.float32, bitcast=True)  # 16 + zero, which may be 16
    if BFLOAT_SCALES:
        scale = (scale_zero << 16).to(gl.float32, bitcast=True)
    else:
        scale = (scale_zero & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return acc + (chunk_sum - zero[:, :, None] * x_sum) * scale[:, :, None]


@gluon.jit
def _accumulate_chunk(acc, pairs, scale_zero, x, first_column, column, row_offset, K, BFLOAT_SCALES: gl.constexpr):
    """Adds the products of each warp's chunk to acc; the columns of run r are first_column + RUN · r + column:
    [WARPS, 1, RUN]; row_offset: [1, rows or 1, 1], of x's rows"""
    X_LAYOUT: gl.constexpr = column.type.layout
    ACC_LAYOUT: gl.constexpr = acc.type.layout
    WEIGHT_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    X_OPERAND_LAYOUT: gl.constexpr = gl.DotOperandLayout(1, ACC_LAYOUT, 2)
    DTYPE: gl.constexpr = x.dtype.element_ty
    SUM_SHAPE: gl.constexpr = [acc.shape[0], INSTRUCTION_OUTPUTS, acc.shape[2]]
    chunk_sum = gl.zeros_like(acc)
    x_sum = gl.zeros(SUM_SHAPE, gl.float32, layout=ACC_LAYOUT)
    ones = gl.full([acc.shape[0], INSTRUCTION_OUTPUTS, RUN], 1.0, DTYPE, layout=WEIGHT_LAYOUT)
    for run in gl.static_range(RUNS):
        k = first_column + RUN * run + column
        x_values = gl.load(x + (row_offset + k), mask=k < K, other=0.0)
        x_values, _ = gl.broadcast(x_values, gl.full([acc.shape[0], acc.shape[2], RUN], 0.0, DTYPE, layout=X_LAYOUT))
        x_operand = _mma_operand(x_values, X_OPERAND_LAYOUT)
        chunk_sum = mma_v2(_mma_operand(_unpack_run(pairs, run, DTYPE), WEIGHT_LAYOUT), x_operand, chunk_sum)
        x_sum = mma_v2(ones, x_operand, x_sum)
        if acc.shape[2] > OPERAND_ROWS:
            keep_loads_here()  # else those of x come before all products, and take too many registers
    return _add_scaled(acc, chunk_sum, _for_all_outputs(x_sum, acc.shape[1]), scale_zero, BFLOAT_SCALES, DTYPE)


@gluon.jit
def _for_all_outputs(x_sum, NUM_OUTPUTS: gl.constexpr):
    """Repeats x_sum: [WARPS, INSTRUCTION_OUTPUTS, rows], which is the same for all outputs, for so many of them."""
    if x_sum.shape[1] == NUM_OUTPUTS:
        return x_sum
    else:  # noqa: RET505 - Triton takes the branch away where it is not a tail
        twice = gl.join(x_sum, x_sum).permute([0, 3, 1, 2]).reshape([x_sum.shape[0], 2 * x_sum.shape[1], x_sum.shape[2]])
        return _for_all_outputs(gl.convert_layout(twice, x_sum.type.layout, assert_trivial=True), NUM_OUTPUTS)


@gluon.jit
def _load_words(ptrs, mask, chunk, num_chunks, stride, warp):
    """Loads the words of one chunk per warp, from `chunk` on, zeros beyond the last: [WARPS, outputs, PAIRS]"""
    mask = mask & (chunk + warp < num_chunks)
    return gl.load(ptrs + chunk * stride, mask=mask[:, :, None], other=0, eviction_policy="evict_first")


@gluon.jit
def _load_scales(ptrs, mask, chunk, num_chunks, num_outputs, warp, GROUP_CHUNKS: gl.constexpr):
    """Loads the scales and zero points of the groups of these chunks: [WARPS, outputs]"""
    mask = mask & (chunk + warp < num_chunks)
    return gl.load(ptrs + (chunk + warp) // GROUP_CHUNKS * num_outputs, mask=mask, other=0, eviction_policy="evict_first")


@gluon.jit(do_not_specialize=["M", "num_squares"])
def fused_int4_rows_kernel(
    x, words, scales_zeros, bias, squares, residual, norm_weight, out, weighted, squares_out,
    M, N, K, x_stride, num_chunks, num_squares, eps, alpha,
    GATE: gl.constexpr, GROUP_CHUNKS: gl.constexpr, BFLOAT_SCALES: gl.constexpr, SQUARES_BLOCK: gl.constexpr,
    NUM_ROWS: gl.constexpr, OUTPUTS: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Program (tile): OUTPUTS columns of out, from both halves of the weight if it is gated. GROUP_CHUNKS: chunks per group;
    NUM_ROWS: 1, or M rounded up to a multiple of OPERAND_ROWS."""
    HALVES: gl.constexpr = 1 if GATE is None else 2
    WORDS_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    X_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    SUMS_LAYOUT: gl.constexpr = sums_layout(OUTPUTS, WARPS)
    PADDED_ROWS: gl.constexpr = NUM_ROWS if NUM_ROWS > 1 else OPERAND_ROWS
    tile = gl.program_id(0)
    num_outputs = N * HALVES
    # The words of a chunk for each warp, and the scales and zero points of its group in the layout of the sums.
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS_LAYOUT)))[:, None]
    row, mask = output_rows(tile, N, HALVES, OUTPUTS, gl.SliceLayout(0, gl.SliceLayout(2, WORDS_LAYOUT)))
    word = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS_LAYOUT)))[None, None, :]
    offset = warp * (num_outputs * PAIRS) + row[None, :] * PAIRS
    word_ptrs = words.to(gl.pointer_type(gl.int32), bitcast=True) + offset[:, :, None] + word
    mask, stride = mask[None, :], num_outputs.to(gl.int64) * PAIRS
    scale_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, ACC_LAYOUT)))[:, None]
    scale_row, scale_mask = output_rows(tile, N, HALVES, OUTPUTS, gl.SliceLayout(0, gl.SliceLayout(2, ACC_LAYOUT)))
    scale_ptrs, scale_mask = scales_zeros + scale_row[None, :], scale_mask[None, :]
    even_words = _load_words(word_ptrs, mask, 0, num_chunks, stride, warp)
    odd_words = _load_words(word_ptrs, mask, WARPS, num_chunks, stride, warp)
    even_scales = _load_scales(scale_ptrs, scale_mask, 0, num_chunks, num_outputs, scale_warp, GROUP_CHUNKS)
    outputs, output_mask = output_rows(tile, N, HALVES, OUTPUTS, gl.SliceLayout(1, SUMS_LAYOUT))
    rows = gl.arange(0, NUM_ROWS, layout=gl.SliceLayout(0, SUMS_LAYOUT))
    bias_values = load_column(bias, outputs, output_mask)
    next_weights = load_column(norm_weight, outputs, output_mask)
    wait_for_previous(EARLY)
    row_squares = load_squares(squares, M, num_squares, SQUARES_BLOCK, NUM_ROWS, WARPS) if NUM_ROWS == 1 else 0.0
    residual_mask = output_mask[:, None] & (rows < M)[None, :]
    residual_values = load_or(residual, rows[None, :] * N + outputs[:, None], residual_mask, 0.0)
    x_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, X_LAYOUT)))[:, None, None]
    column = x_warp * COLUMNS + gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(1, X_LAYOUT)))[None, None, :]
    row_offset = row_offsets(M, x_stride, NUM_ROWS, X_LAYOUT)
    acc = gl.zeros([WARPS, HALVES * OUTPUTS, PADDED_ROWS], gl.float32, layout=ACC_LAYOUT)
    # Unrolled by two, so that no registers are moved between iterations.
    for chunk in range(0, num_chunks, 2 * WARPS):
        odd_scales = _load_scales(scale_ptrs, scale_mask, chunk + WARPS, num_chunks, num_outputs, scale_warp, GROUP_CHUNKS)
        keep_loads_here()  # else they come behind the even chunk, and are waited for
        acc = _accumulate_chunk(acc, even_words, even_scales, x, chunk * COLUMNS, column, row_offset, K, BFLOAT_SCALES)
        even_words = _load_words(word_ptrs, mask, chunk + 2 * WARPS, num_chunks, stride, warp)
        even_scales = _load_scales(scale_ptrs, scale_mask, chunk + 2 * WARPS, num_chunks, num_outputs, scale_warp, GROUP_CHUNKS)
        keep_loads_here()  # else they come behind the odd chunk, and nothing is in flight while that is multiplied
        acc = _accumulate_chunk(acc, odd_words, odd_scales, x, (chunk + WARPS) * COLUMNS, column, row_offset, K, BFLOAT_SCALES)
        odd_words = _load_words(word_ptrs, mask, chunk + 3 * WARPS, num_chunks, stride, warp)
    if NUM_ROWS > 1:  # so many that they would take registers of the loop
        row_squares = load_squares(squares, M, num_squares, SQUARES_BLOCK, NUM_ROWS, WARPS)
    apply_epilogue(
        add_warps(acc, NUM_ROWS, SUMS_LAYOUT), outputs, output_mask, rows, rows < M, bias_values, squares, row_squares,
        residual, residual_values, norm_weight, next_weights, out, weighted, squares_out, tile, M, N, K, eps, alpha,
        OUTPUTS, GATE,
    )  # fmt: skip


def launch_int4_rows(x: torch.Tensor, weight: Int4Weight, epilogue: Epilogue, tiles: HopperTiles) -> None:
    """As `fused_int4.launch`, for M ≤ 16. x: [M, K] of 16 bits, columns in the weight's order, in groups of whole chunks.

    2 · N · K operations on tensor cores for M rounded up to a multiple of 8, and as many again for the sums of x of each 16
    outputs' first half. Rows beyond M, outputs beyond N and columns beyond K are masked. Reads N·K / 2 + 4·N·K / group bytes of
    weights once, and 2·M·K bytes of x in each program. Sums of a group are scaled and added in float32, in an order that
    depends on K alone.
    """
    (num_rows, num_columns), outputs = x.shape, epilogue.out.shape[1]
    fused_int4_rows_kernel[(triton.cdiv(outputs, tiles.block_n),)](
        x, weight.words, weight.scales_zeros, *epilogue.tensors,
        num_rows, outputs, num_columns, x.stride(0) if num_rows > 1 else num_columns, weight.words.shape[0],
        epilogue.num_squares, epilogue.eps, epilogue.alpha,
        GATE=epilogue.gate, GROUP_CHUNKS=weight.group_size // CHUNK_COLUMNS, BFLOAT_SCALES=weight.scale_dtype is torch.bfloat16,
        SQUARES_BLOCK=power_of_two(epilogue.num_squares), NUM_ROWS=tiles.num_rows, OUTPUTS=tiles.block_n,
        WARPS=tiles.num_warps, num_warps=tiles.num_warps, maxnreg=tiles.registers_max, **early_launch(x.device, num_rows),
    )  # fmt: skip
