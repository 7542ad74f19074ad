"""Mixtures of experts without host synchronisation: tokens are sorted by expert on the card, one launch per grouped product.

Nothing is copied back, and the size of every launch depends on the number of tokens alone, so a step can be captured in a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from kernels.quantised_weights import Int4Weight, Weight
from kernels.triton.experts import int4
from kernels.triton.experts.tiles import SortedTokens, group_tiles, locate_tile, max_row_tiles, sort_by_expert
from kernels.triton.experts.weights import ExpertWeights, bind_weights, have_same_format
from kernels.triton.launching.card_properties import capability, power_of_two
from kernels.triton.products.tiles import cast_weight
from kernels.triton.rows.activation import gated_activation

COMBINE_BLOCK = 1024
"""Columns of a program of four warps: each thread loads eight of every choice, 16 bytes in 16 bits."""
ACTIVATIONS = ("silu", "gelu_tanh")


@triton.jit(do_not_specialize=["row_tiles"])
def grouped_kernel(
    x_ptr,
    weights_ptr,
    scales_ptr,
    order_ptr,
    offsets_ptr,
    factors_ptr,
    out_ptr,
    N,
    K,
    stride_x,
    stride_weight,
    stride_out,
    row_tiles,
    NUM_CHOSEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CODE_DTYPE: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of one expert. With ACTIVATION it reads tokens' rows and stores act(gate) · up in sorted order; without, it
    reads sorted rows and stores results in the order of the assignments.

    CODE_DTYPE: the type of 8-bit weights; the scale of an output is applied after its sum, so it is exact and costs nothing per
    weight.
    """
    GATED: tl.constexpr = ACTIVATION != ""
    tile = tl.program_id(0) % row_tiles
    columns = (tl.program_id(0) // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, first, last = locate_tile(offsets_ptr, tile, EXPERTS, EXPERTS_BLOCK, BLOCK_M)
    if expert >= EXPERTS:
        return
    sorted_rows = first + tl.arange(0, BLOCK_M)
    row_mask, column_mask = sorted_rows < last, columns < N
    assignments = tl.load(order_ptr + sorted_rows, mask=row_mask, other=0)
    x_rows = assignments // NUM_CHOSEN if GATED else sorted_rows
    k_offsets = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + x_rows.to(tl.int64)[:, None] * stride_x + k_offsets[None, :]
    WEIGHT_DTYPE: tl.constexpr = x_ptr.dtype.element_ty if CODE_DTYPE is None else CODE_DTYPE
    weight = tl.load(weights_ptr + expert).to(tl.pointer_type(WEIGHT_DTYPE))
    w_ptrs = tl.multiple_of(weight, 16) + columns[None, :] * stride_weight + k_offsets[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x_mask, w_mask = row_mask[:, None], column_mask[None, :]
        if not EVEN_K:
            x_mask = x_mask & (k_offsets < K - k)[None, :]
            w_mask = w_mask & (k_offsets < K - k)[:, None]
        x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
        w = cast_weight(tl.load(w_ptrs + k, mask=w_mask, other=0.0), x.dtype)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        if GATED:
            w = cast_weight(tl.load(w_ptrs + (N * stride_weight + k), mask=w_mask, other=0.0), x.dtype)
            up = tl.dot(x, w, up, input_precision="ieee")
    if scales_ptr is not None:
        scales = tl.load(scales_ptr + expert).to(tl.pointer_type(tl.float32))
        acc *= tl.load(scales + columns, mask=column_mask, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scales + N + columns, mask=column_mask, other=0.0)[None, :]
    if GATED:
        acc = gated_activation(acc, up, ACTIVATION == "gelu_tanh")
        out_rows = sorted_rows
    else:
        acc *= tl.load(factors_ptr + assignments, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        out_rows = assignments
    out_ptrs = out_ptr + out_rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def combine_kernel(
    expert_out_ptr, expert_ids_ptr, out_ptr, num_experts, width, stride_out, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr
):
    """out[t] = Σ_j expert_out[t · chosen + j], in float32 and in the order of the choices; rows without an expert, which no
    program has written, count as zero."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        assignment = token * NUM_CHOSEN + choice
        value = tl.load(expert_out_ptr + assignment * width + columns, mask=mask, other=0.0).to(tl.float32)
        acc += tl.where(tl.load(expert_ids_ptr + assignment) < num_experts, value, 0.0)
    tl.store(out_ptr + token * stride_out + columns, acc.to(out_ptr.dtype.element_ty), mask=mask)


def grouped_linear(
    x: torch.Tensor,
    weights: ExpertWeights,
    tokens: SortedTokens,
    *,
    activation: str = "",
    factors: torch.Tensor | None = None,
    tokens_per_expert: float | None = None,
) -> torch.Tensor:
    """Each expert's product over its own tokens, for all experts in one launch. Weights are unquantised or of 8 or 4 bits.

    With `activation` ("silu", "gelu_tanh"): x: [T, K], weights: E times [2·N, K], gate over up → act(x Gᵀ) · (x Uᵀ):
    [T · chosen, N] in the order of the experts. Without: x: [T · chosen, K] in that order, weights: E times [N, K],
    factors: [T, chosen] → factor · x Wᵀ: [T · chosen, N], row t · chosen + j for the j-th choice of token t.

    Source: grouped GEMM over sorted tokens (arXiv 2211.15841), with as many programs as T tokens may need; those without a tile
    exit at once. Reads each chosen expert's weights once per tile of its tokens, 2 · 2·N·K or 2·N·K bytes, and its rows; 2 ·
    rows · N · K operations per matrix. Rows of other experts, columns beyond N and K are masked. Codes of 8 and 4 bits are half
    and a quarter of these bytes, and are dequantised in registers to x's type, which holds them exactly; x is never rounded to
    8 bits. Accumulates in float32; activation and factor are applied in float32 before one rounding. A tile sums all columns in
    order: with a fixed `tokens_per_expert`, by which tiles are chosen, a row has the same bits in any batch.
    """
    num_experts = weights.num_experts
    num_outputs, num_columns = weights.shape
    if (activation != "") != (factors is None) or activation not in ("", *ACTIVATIONS):
        phrase = "without" if factors is None else "with"
        raise ValueError(f"either an activation ({', '.join(ACTIVATIONS)}) or factors: not {activation!r} {phrase} factors")
    num_outputs = num_outputs // 2 if activation else num_outputs
    num_assignments = tokens.order.numel()
    out = x.new_empty(num_assignments, num_outputs)
    if not num_assignments:
        return out
    factors = None if factors is None else factors.contiguous()
    tokens_per_expert = num_assignments / num_experts if tokens_per_expert is None else tokens_per_expert
    if isinstance(weights.first, Int4Weight):
        int4.launch(x, weights, tokens, activation, factors, out, tokens_per_expert)
        return out
    tiles = group_tiles(tokens_per_expert, capability(x.device), gated=activation != "")
    row_tiles = max_row_tiles(num_assignments, num_experts, tiles.block_m)
    grouped_kernel[(row_tiles * triton.cdiv(num_outputs, tiles.block_n),)](
        x, weights.addresses, weights.scale_addresses, tokens.order, tokens.offsets, factors, out,
        num_outputs, num_columns, x.stride(0), weights.row_stride, out.stride(0), row_tiles,
        NUM_CHOSEN=tokens.num_chosen, ACTIVATION=activation, CODE_DTYPE=weights.code_dtype, EXPERTS=num_experts,
        EXPERTS_BLOCK=power_of_two(num_experts), EVEN_K=num_columns % tiles.block_k == 0,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        STAGES=tiles.num_stages, num_warps=tiles.num_warps,
    )  # fmt: skip
    return out


def mix_gated_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
    tokens_per_expert: float | None = None,
) -> torch.Tensor:
    """out[t] = Σ_j weights[t, j] · down_e(act(gate_e(x[t])) · up_e(x[t])), e = expert_ids[t, j] (arXiv 2401.04088)

    x: [T, hidden], weights: [T, chosen], expert_ids: [T, chosen], gate_up: E times [2·inner, hidden], down: E times
    [hidden, inner] → [T, hidden]. Four launches: sort, gate and up with the activation, down with the weight, sum over a
    token's choices in order and in float32, so that a row does not depend on the rest of the batch. Bytes and operations are
    those of `grouped_linear` twice and 2 · T · (chosen + 1) · hidden bytes for the sum. Id E stands for no expert.
    """
    out = torch.empty_like(x) if out is None else out
    num_tokens, hidden = x.shape
    if not num_tokens:
        return out
    expert_ids = expert_ids.contiguous()
    tokens = sort_by_expert(expert_ids, gate_up.num_experts)
    inner = grouped_linear(x, gate_up, tokens, activation=activation, tokens_per_expert=tokens_per_expert)
    expert_out = grouped_linear(inner, down, tokens, factors=weights, tokens_per_expert=tokens_per_expert)
    combine_kernel[(num_tokens, triton.cdiv(hidden, COMBINE_BLOCK))](
        expert_out,
        expert_ids,
        out,
        gate_up.num_experts,
        hidden,
        out.stride(0),
        NUM_CHOSEN=expert_ids.shape[1],
        BLOCK=COMBINE_BLOCK,
    )
    return out


def bind_experts(
    gate_ups: Sequence[Weight], downs: Sequence[Weight], activation: str, *, tokens_per_expert: float | None = None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Binds the experts' matrices without copying them: a function (x, weights, expert ids) → mixture that graphs may capture.

    None if experts differ in format, or have permuted columns. `tokens_per_expert`: see `grouped_linear`.
    """
    if not have_same_format(gate_ups) or not have_same_format(downs):
        return None
    gate_up, down = bind_weights(gate_ups), bind_weights(downs)

    def mix(x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        return mix_gated_experts(
            x, weights, expert_ids, gate_up, down, activation=activation, tokens_per_expert=tokens_per_expert
        )

    return mix
