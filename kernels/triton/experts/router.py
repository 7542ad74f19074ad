"""Routes each token to its top-k experts in one launch: softmax, selection, weights. Rows of padding get no expert.

One program per row selects in registers: it finds the largest logit and removes it, once per choice. Logits are compared as
integers of the same order, and ties go to the lower expert, so that the choice is the same on every card and in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launching.card_properties import LOG2_E, power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous

WARP_EXPERTS = 512
"""Experts per warp, 16 per thread."""
_LOG2_E = tl.constexpr(LOG2_E)
_REMOVED = tl.constexpr(-(2**31))  # below any converted logit
_NAN = tl.constexpr(2**31 - 1)  # above, as in torch's order


@triton.jit
def ordered_bits(value):
    """Converts float32 to integers of the same order: zeros of both signs are equal, NaN is the largest."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, _NAN, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def from_ordered_bits(bits):
    """The inverse of `ordered_bits`."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def route_kernel(
    logits, slots, weights, expert_ids, row_stride,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, CHOSEN: tl.constexpr, CHOSEN_BLOCK: tl.constexpr,
    NORMALISED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (row)"""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    experts, choices = tl.arange(0, EXPERTS_BLOCK), tl.arange(0, CHOSEN_BLOCK)
    is_expert, is_choice = experts < EXPERTS, choices < CHOSEN
    value = tl.load(logits + row * row_stride + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    remaining = tl.where(is_expert, ordered_bits(value), _REMOVED)
    max_bits = tl.max(remaining, 0)
    chosen = tl.zeros([CHOSEN_BLOCK], tl.int32)
    chosen_bits = chosen + max_bits
    for choice in range(CHOSEN):
        best = tl.max(remaining, 0)
        expert = tl.min(tl.where(remaining == best, experts, EXPERTS), 0)
        remaining = tl.where(experts == expert, _REMOVED, remaining)
        chosen = tl.where(choices == choice, expert, chosen)
        chosen_bits = tl.where(choices == choice, best, chosen_bits)
    largest = from_ordered_bits(max_bits)
    numerator = tl.exp2((from_ordered_bits(chosen_bits) - largest) * _LOG2_E)
    if NORMALISED:
        denominator = tl.sum(tl.where(is_choice, numerator, 0.0), 0)
    else:
        denominator = tl.sum(tl.where(is_expert, tl.exp2((value - largest) * _LOG2_E), 0.0), 0)
    weight = numerator / denominator
    if slots is not None:
        is_live = tl.load(slots + row) >= 0
        weight, chosen = tl.where(is_live, weight, 0.0), tl.where(is_live, chosen, EXPERTS)
    offsets = row * CHOSEN + choices
    tl.store(weights + offsets, weight.to(weights.dtype.element_ty), mask=is_choice)
    tl.store(expert_ids + offsets, chosen.to(tl.int64), mask=is_choice)


def route_live(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    normalised: bool,
    slots: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest experts of each row and their softmax over all E, which `normalised` divides by their sum; expert E and
    weight 0 where slots[t] < 0, for a row of padding.

    logits: [T, E] float32, bf16 or fp16, rows need not be contiguous, num_chosen ≤ E, slots: [T] int64 or int32 → weights: [T,
    num_chosen] like logits, expert ids: [T, num_chosen] int64, likeliest first, on ties the lower expert first. A row that
    contains NaN or +inf, or only -inf, has NaN for weights and distinct experts.

    Source: arXiv 2401.04088, section 2.1: the softmax over the chosen ones is the normalised one over all. Reads T · E logits,
    writes 8 bytes and a weight per choice; some 4 · E operations per choice, and softmax in float32, rounded once. Experts
    beyond E are masked. A row's sums are in an order that follows from E alone.
    """
    num_rows, num_experts = logits.shape
    shape, device = (num_rows, num_chosen), logits.device
    if out is None:
        out = torch.empty(shape, dtype=logits.dtype, device=device), torch.empty(shape, dtype=torch.int64, device=device)
    block = power_of_two(num_experts)
    if num_rows:
        route_kernel[(num_rows,)](
            logits, slots, *out, logits.stride(0), num_experts, block, num_chosen, power_of_two(num_chosen), normalised,
            num_warps=num_router_warps(block), **early_launch(device, num_rows),
        )  # fmt: skip
    return out


def num_router_warps(block: int) -> int:
    """For `block` experts, a power of two. As few as possible: with one warp, reductions need no synchronisation."""
    return min(8, max(1, block // WARP_EXPERTS))
