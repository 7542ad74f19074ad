"""Mixtures of experts without a word from the host: tokens sorted by expert on the card, one launch for each product.

Nothing is copied back and every launch has a size that follows from the number of tokens alone, so a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.compilation import Compilation
from kernels.triton.linear_tiles import SPILL_BYTES_MAX
from kernels.triton.tuning import capability, power_of_two

SORT_BLOCK = 1024
COMBINE_BLOCK = 1024
ACTIVATIONS = ("silu", "gelu_tanh")
SMALL_CARDS = (86, 89, 120)  # with 100 KiB of shared memory


@dataclass(frozen=True, slots=True)
class SortedTokens:
    """order: [T · chosen] int32, the places of `expert_ids` by expert, first come first; expert e has those from offsets[e]
    to offsets[e + 1] - 1. offsets: [E + 1] int32. Place t · chosen + j is the j-th choice of token t."""

    order: torch.Tensor
    offsets: torch.Tensor
    num_chosen: int


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """table: [E] int64, where each expert's matrix begins; `matrices` keeps them alive and knows their shape."""

    table: torch.Tensor
    matrices: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class GroupTiles:
    """Sizes of one program's work; the gated kernel reads `block_n` rows of gate and as many of up."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
def sort_kernel(expert_ids_ptr, order_ptr, offsets_ptr, num_places, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Program e counts the places of lower experts, then writes down its own, in their order."""
    expert = tl.program_id(0)
    before = 0
    for first in range(0, num_places, BLOCK):
        places = first + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids_ptr + places, mask=places < num_places, other=EXPERTS)
        before += tl.sum((ids < expert).to(tl.int32), axis=0)
    tl.store(offsets_ptr + expert, before)
    if expert == EXPERTS - 1:
        tl.store(offsets_ptr + EXPERTS, num_places)
    for first in range(0, num_places, BLOCK):
        places = first + tl.arange(0, BLOCK)
        ids = tl.load(expert_ids_ptr + places, mask=places < num_places, other=EXPERTS)
        own = (ids == expert).to(tl.int32)
        tl.store(order_ptr + before + tl.cumsum(own, axis=0) - 1, places, mask=own > 0)
        before += tl.sum(own, axis=0)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """silu(g) = g · sigmoid(g); gelu(g) by tanh is g · sigmoid(2 · √(2/π) · (g + 0.044715 g³))."""
    inner = gate if ACTIVATION == "silu" else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp2(tl.minimum(-inner * 1.4426950408889634, 127.0)))  # no overflow: 2⁻¹²⁷ is nothing


@triton.jit
def grouped_kernel(
    x_ptr,
    weights_ptr,
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
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of one expert. With ACTIVATION: tokens' rows in, act(gate) · up by sorted place out; without: the other way."""
    GATED: tl.constexpr = ACTIVATION != ""
    tile = tl.program_id(0) % row_tiles
    columns = (tl.program_id(0) // row_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Which expert's tile this is: the experts' numbers of tiles, added up.
    experts = tl.arange(0, EXPERTS_BLOCK)
    begins = tl.load(offsets_ptr + experts, mask=experts < EXPERTS, other=0)
    ends = tl.load(offsets_ptr + experts + 1, mask=experts < EXPERTS, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    until = tl.cumsum(tiles, axis=0)
    expert = tl.sum((until <= tile).to(tl.int32), axis=0)
    if expert >= EXPERTS:
        return
    is_own = experts == expert
    first = tl.sum(tl.where(is_own, begins + (tile - until + tiles) * BLOCK_M, 0), axis=0)
    last = tl.sum(tl.where(is_own, ends, 0), axis=0)
    sorted_places = first + tl.arange(0, BLOCK_M)
    row_mask, column_mask = sorted_places < last, columns < N
    places = tl.load(order_ptr + sorted_places, mask=row_mask, other=0)
    x_rows = places // NUM_CHOSEN if GATED else sorted_places
    inner = tl.arange(0, BLOCK_K)
    x_places = x_ptr + x_rows.to(tl.int64)[:, None] * stride_x + inner[None, :]
    weight = tl.load(weights_ptr + expert).to(tl.pointer_type(x_ptr.dtype.element_ty))
    w_places = tl.multiple_of(weight, 16) + columns[None, :] * stride_weight + inner[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x_mask, w_mask = row_mask[:, None], column_mask[None, :]
        if not EVEN_K:
            x_mask = x_mask & (inner < K - k)[None, :]
            w_mask = w_mask & (inner < K - k)[:, None]
        x = tl.load(x_places + k, mask=x_mask, other=0.0)
        acc = tl.dot(x, tl.load(w_places + k, mask=w_mask, other=0.0), acc, input_precision="ieee")
        if GATED:
            up = tl.dot(x, tl.load(w_places + (N * stride_weight + k), mask=w_mask, other=0.0), up, input_precision="ieee")
    if GATED:
        acc = _activated(acc, ACTIVATION) * up
        out_rows = sorted_places
    else:
        acc *= tl.load(factors_ptr + places, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        out_rows = places
    out_places = out_ptr + out_rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_places, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def combine_kernel(parts_ptr, out_ptr, width, stride_out, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = Σ_j parts[t · chosen + j], in float32 and in the order of the choices."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        total += tl.load(parts_ptr + (token * NUM_CHOSEN + choice) * width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def sort_by_expert(expert_ids: torch.Tensor, num_experts: int) -> SortedTokens:
    """expert_ids: [T, chosen] integers → the places of every expert, stable: a program an expert, each reads all ids twice.

    Source: counting sort. Reads 2 · E · T · chosen ids, from the second-level cache but for the first; writes 4 bytes each.
    """
    num_places = expert_ids.numel()
    order = torch.empty(num_places, dtype=torch.int32, device=expert_ids.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=expert_ids.device)
    sort_kernel[(num_experts,)](expert_ids.contiguous(), order, offsets, num_places, num_experts, SORT_BLOCK)
    return SortedTokens(order, offsets, expert_ids.shape[1])


def bind_weights(weights: Sequence[torch.Tensor]) -> ExpertWeights:
    """One matrix [N, K] for each expert, all alike, wherever they lie: 16-byte aligned, rows `stride` apart.

    Raises ValueError where they differ.
    """
    first = weights[0]
    kind = first.shape, first.stride(), first.dtype, first.device
    if any((other.shape, other.stride(), other.dtype, other.device) != kind for other in weights):
        raise ValueError("the experts' matrices differ in shape, layout or type")
    if first.stride(1) != 1 or any(other.data_ptr() % 16 for other in weights):
        raise ValueError("the experts' matrices must begin on 16 bytes and have contiguous rows")
    table = torch.tensor([weight.data_ptr() for weight in weights], dtype=torch.int64).to(first.device)
    return ExpertWeights(table, tuple(weights))


def grouped_linear(
    x: torch.Tensor,
    weights: ExpertWeights,
    tokens: SortedTokens,
    *,
    activation: str = "",
    factors: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each expert's product over its own tokens, for all experts in one launch.

    With `activation` ("silu", "gelu_tanh"): x: [T, K], weights: E times [2·N, K], gate over up → act(x Gᵀ) · (x Uᵀ):
    [T · chosen, N] in the order of the experts. Without: x: [T · chosen, K] in that order, weights: E times [N, K],
    factors: [T, chosen] → factor · x Wᵀ: [T · chosen, N], row t · chosen + j for the j-th choice of token t.

    Source: grouped products by sorted tokens (arXiv 2211.15841), with as many programs as T tokens can ask for; those that
    have no tile end at once. Reads each chosen expert's weights once per tile of its tokens, 2 · 2·N·K or 2·N·K bytes, and
    its rows; 2 · rows · N · K operations a matrix. Rows of other experts, columns beyond N and K are masked. Accumulates in
    float32, activation and factor in float32 before one rounding.
    """
    num_experts = len(weights.matrices)
    num_outputs, num_columns = weights.matrices[0].shape
    if (activation != "") != (factors is None) or activation not in ("", *ACTIVATIONS):
        given = "without" if factors is None else "with"
        raise ValueError(f"either an activation ({', '.join(ACTIVATIONS)}) or factors: not {activation!r} {given} factors")
    num_outputs = num_outputs // 2 if activation else num_outputs
    num_places = tokens.order.numel()
    out = x.new_empty(num_places, num_outputs) if out is None else out
    if not num_places:
        return out
    tiles = group_tiles(num_places, num_experts, capability(x.device), gated=activation != "")
    row_tiles = num_places // tiles.block_m + min(num_experts, num_places)
    grouped_kernel[(row_tiles * triton.cdiv(num_outputs, tiles.block_n),)](
        x, weights.table, tokens.order, tokens.offsets, None if factors is None else factors.contiguous(), out,
        num_outputs, num_columns, x.stride(0), weights.matrices[0].stride(0), out.stride(0), row_tiles,
        NUM_CHOSEN=tokens.num_chosen, ACTIVATION=activation, EXPERTS=num_experts, EXPERTS_BLOCK=power_of_two(num_experts),
        EVEN_K=num_columns % tiles.block_k == 0, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
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
) -> torch.Tensor:
    """out[t] = Σ_j weights[t, j] · down_e(act(gate_e(x[t])) · up_e(x[t])), e = expert_ids[t, j] (arXiv 2401.04088)

    x: [T, hidden], weights: [T, chosen], expert_ids: [T, chosen], gate_up: E times [2·inner, hidden], down: E times
    [hidden, inner] → [T, hidden]. Four launches: sort, gate and up with the activation, down with the weight, sum over a
    token's choices in their order and in float32, so that a row does not depend on who else is in the batch. Bytes and
    operations are those of `grouped_linear` twice and 2 · T · (chosen + 1) · hidden bytes for the sum.
    """
    out = torch.empty_like(x) if out is None else out
    num_tokens, hidden = x.shape
    if not num_tokens:
        return out
    tokens = sort_by_expert(expert_ids, len(gate_up.matrices))
    inner = grouped_linear(x, gate_up, tokens, activation=activation)
    parts = grouped_linear(inner, down, tokens, factors=weights)
    combine_kernel[(num_tokens, triton.cdiv(hidden, COMBINE_BLOCK))](
        parts, out, hidden, out.stride(0), NUM_CHOSEN=expert_ids.shape[1], BLOCK=COMBINE_BLOCK
    )
    return out


def bind_experts(
    gate_ups: Sequence[torch.Tensor], downs: Sequence[torch.Tensor], activation: str
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """The experts' matrices where they lie → a function (x, weights, expert ids) → mixture, which a graph may capture."""
    gate_up, down = bind_weights(gate_ups), bind_weights(downs)

    def mix(x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        return mix_gated_experts(x, weights, expert_ids, gate_up, down, activation=activation)

    return mix


def group_tiles(num_places: int, num_experts: int, capability: int, *, gated: bool) -> GroupTiles:
    """By how many tokens an expert has if all have the same number."""
    rows = num_places / num_experts
    small = capability in SMALL_CARDS
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        return GroupTiles(block_m, 32 if gated else 64, 128, num_warps=4, num_stages=4 if small else 5)
    if rows <= 96:
        return GroupTiles(64, 64, 64, num_warps=4, num_stages=3 if small else 4)
    return GroupTiles(128, 64 if gated else 128, 64, num_warps=8, num_stages=2 if small else 3)


def compilations() -> list[Compilation]:
    """Qwen3-30B-A3B (128 experts, 8 chosen) and Mixtral 8x7B (8, 2), from a decode step to a prefill."""
    launches = [
        _compilation(dtype, number, experts, chosen, each * experts, activation)
        for dtype, number, experts, chosen, tokens_each in (
            ("bf16", 80, 128, 8, (16, 512)),
            ("bf16", 89, 128, 8, (16, 512)),
            ("bf16", 90, 128, 8, (16, 32, 64, 512)),
            ("fp16", 90, 8, 2, (16, 512)),
            ("bf16", 100, 128, 8, (16, 512)),
        )
        for each in tokens_each
        for activation in ("silu", "")
    ]
    places, floats = {"num_places": "i32", "offsets_ptr": "*i32"}, {"parts_ptr": "*bf16", "out_ptr": "*bf16"}
    return [
        *launches,
        Compilation(
            "sort_by_expert_128",
            sort_kernel,
            {"expert_ids_ptr": "*i64", "order_ptr": "*i32", **places},
            {"EXPERTS": 128, "BLOCK": SORT_BLOCK},
        ),
        Compilation(
            "combine_experts_8",
            combine_kernel,
            {**floats, "width": "i32", "stride_out": "i32"},
            {"NUM_CHOSEN": 8, "BLOCK": COMBINE_BLOCK},
            divisible=("width", "stride_out"),
        ),
    ]


def _compilation(dtype: str, number: int, experts: int, chosen: int, places: int, activation: str) -> Compilation:
    tiles = group_tiles(places, experts, number, gated=activation != "")
    sizes = ("N", "K", "stride_x", "stride_weight", "stride_out")
    passed = {} if activation else {"factors_ptr": f"*{dtype}"}
    return Compilation(
        f"grouped_{'gated' if activation else 'down'}_{dtype}_{experts}experts_{places}_sm{number}",
        grouped_kernel,
        {
            "x_ptr": f"*{dtype}", "weights_ptr": "*i64", "order_ptr": "*i32", "offsets_ptr": "*i32",
            "out_ptr": f"*{dtype}", **passed, **dict.fromkeys((*sizes, "row_tiles"), "i32"),
        },
        {
            **({"factors_ptr": None} if activation else {}), "NUM_CHOSEN": chosen, "ACTIVATION": activation,
            "EXPERTS": experts, "EXPERTS_BLOCK": power_of_two(experts), "EVEN_K": True, "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        },
        tiles.num_warps, tiles.num_stages, (number,), tensor_cores=True, small_tile=tiles.block_m < 64, divisible=sizes,
        spill_bytes_max=SPILL_BYTES_MAX,
    )  # fmt: skip
