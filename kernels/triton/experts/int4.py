"""Products of all experts with 4-bit weights in one launch: the loop of products/int4.py over the tiles of mixture.py.

A gated program multiplies equal numbers of outputs of both halves in one loop, side by side, and separates their sums at the
end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import CHUNK_COLUMNS, Int4Weight
from kernels.triton.experts.tiles import SortedTokens, locate_tile, max_row_tiles
from kernels.triton.experts.weights import ExpertWeights
from kernels.triton.launching.card_properties import capability, card, power_of_two
from kernels.triton.products.int4 import OUTPUTS, Int4Tiles, check_int4_rows
from kernels.triton.products.int4_codes import accumulate_int4
from kernels.triton.rows.activation import gated_activation


@triton.jit(do_not_specialize=["row_tiles"])
def grouped_int4_kernel(
    x_ptr, words_ptr, scales_zeros_ptr, order_ptr, offsets_ptr, factors_ptr, out_ptr,
    N, K, stride_x, stride_out, num_chunks, row_tiles,
    NUM_CHOSEN: tl.constexpr, ACTIVATION: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr,
    GROUP: tl.constexpr, BFLOAT_SCALES: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As `grouped_kernel` of mixture.py. words_ptr and scales_zeros_ptr: tables of addresses; N counts the columns of out."""
    HALVES: tl.constexpr = 1 if ACTIVATION == "" else 2
    tile = tl.program_id(0) % row_tiles
    first_column = (tl.program_id(0) // row_tiles) * BLOCK_N
    expert, first, last = locate_tile(offsets_ptr, tile, EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    sorted_rows = first + tl.arange(0, BLOCK_M)
    row_mask = sorted_rows < last
    assignments = tl.load(order_ptr + sorted_rows, mask=row_mask, other=0)
    x_rows = sorted_rows if ACTIVATION == "" else assignments // NUM_CHOSEN
    lanes = tl.arange(0, HALVES * BLOCK_N)
    lane_columns = first_column + lanes % BLOCK_N
    words = tl.multiple_of(tl.load(words_ptr + expert).to(tl.pointer_type(tl.int16)), 16)
    scales_zeros = tl.load(scales_zeros_ptr + expert).to(tl.pointer_type(tl.int32))
    acc = accumulate_int4(
        x_ptr, x_rows, row_mask, stride_x, words, scales_zeros, lane_columns + (lanes // BLOCK_N) * N, lane_columns < N,
        HALVES * N, K, 0, num_chunks, GROUP=GROUP, BFLOAT_SCALES=BFLOAT_SCALES, EVEN_K=EVEN_K, STAGES=STAGES,
    )  # fmt: skip
    if ACTIVATION == "":
        acc *= tl.load(factors_ptr + assignments, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        out_rows = assignments
    else:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        acc = gated_activation(gate, up, ACTIVATION == "gelu_tanh")
        out_rows = sorted_rows
    columns = first_column + tl.arange(0, BLOCK_N)
    out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & (columns < N)[None, :])


def launch(
    x: torch.Tensor,
    weights: ExpertWeights,
    tokens: SortedTokens,
    activation: str,
    factors: torch.Tensor | None,
    out: torch.Tensor,
    tokens_per_expert: float,
) -> None:
    """As `grouped_linear` of mixture.py, with its formula and source. x: 16 bits, else ValueError. Reads N·K / 2 + 4·N·K /
    group bytes of each chosen expert per tile of its tokens; 2 · N · K operations per assignment. Rows beyond an expert's,
    outputs beyond N and columns beyond K are masked. Sums of a group are scaled and added in float32.
    """
    check_int4_rows(x)
    first = weights.first
    assert isinstance(first, Int4Weight), "other weights have kernels of their own"
    num_assignments, num_outputs = out.shape
    num_experts, num_columns = weights.num_experts, first.num_columns
    tiles = group_int4_tiles(tokens_per_expert, capability(x.device), gated=activation != "")
    row_tiles = max_row_tiles(num_assignments, num_experts, tiles.block_m)
    grouped_int4_kernel[(row_tiles * triton.cdiv(num_outputs, tiles.block_n),)](
        x, weights.addresses, weights.scale_addresses, tokens.order, tokens.offsets, factors, out,
        num_outputs, num_columns, x.stride(0), out.stride(0), first.words.shape[0], row_tiles,
        NUM_CHOSEN=tokens.num_chosen, ACTIVATION=activation, EXPERTS=num_experts, EXPERTS_BLOCK=power_of_two(num_experts),
        GROUP=first.group_size, BFLOAT_SCALES=first.scale_dtype is torch.bfloat16, EVEN_K=num_columns % CHUNK_COLUMNS == 0,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip


def group_int4_tiles(rows: float, capability: int, *, gated: bool) -> Int4Tiles:
    """rows: tokens per expert if they were spread evenly; sizes as in `int4_tiles`."""
    is_small = card(capability).is_small
    block_n = OUTPUTS // 2 if gated else OUTPUTS
    if rows <= 32:
        return Int4Tiles(16 if rows <= 16 else 32, block_n, num_warps=4, num_stages=4 if is_small else 6)
    if rows <= 96 or capability != 90:
        return Int4Tiles(64, block_n, num_warps=4 if rows <= 96 else 8, num_stages=3)
    return Int4Tiles(128, block_n, num_warps=8, num_stages=3)
