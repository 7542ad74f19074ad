"""The output head fused with its argmax: the most likely token of a few rows, without writing their logits.

Formula. argmax_v round(scale[v] · Σ_k hidden[m, k] · weight[v, k]), the lowest id on ties, rounded to the type of the rows as
the logits of a separate product would be; only 8-bit weights have a scale. Sums in float32, columns in the order of
`kernels.triton.products.linear` without splits, or of the tiles of `linear_int8` and `linear_fp8`.
Memory: 2·V·K bytes of weights once (1.05 GB for Llama-3.1-8B, 0.24 ms at 4.3 TB/s), V·K in 8 bits; 8 bytes per row for each of
V / 64 tiles, which `merge_argmax` reads; a separate product writes and reads logits. 2·M·V·K operations on tensor cores, tiles
of 16 rows whatever M is. Rows beyond M and tokens beyond V are masked. A row with NaN or +inf, or with nothing above -inf, gets
NO_TOKEN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl

from kernels.gumbel import NO_TOKEN
from kernels.operations import FUSED_ROWS_MAX
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, Weight, values_and_scales
from kernels.triton.launching.card_properties import capability, card, multiprocessors, power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.products import hopper_tiles
from kernels.triton.products.linear import skinny_tiles
from kernels.triton.products.tiles import FLOAT32_FEW_ROWS, Tiles, byte_tiles, cast_weight

TILES = Tiles(FUSED_ROWS_MAX, 64, 128, num_warps=4, num_stages=6)
_ROWS = tl.constexpr(FUSED_ROWS_MAX)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_ID_SENTINEL = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["M", "V", "tiles"])
def head_kernel(
    hidden, weight, scales, maxima, tokens, M, V, K, hidden_stride, weight_stride, tiles,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile): the largest logit of TOKENS tokens in each row, and its token; NaN counts as +inf."""
    tile = tl.program_id(0)
    row = tl.arange(0, _ROWS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    weights = weight + token.to(tl.int64)[None, :] * weight_stride + column[:, None]
    inputs = hidden + row[:, None] * hidden_stride + column[None, :]
    wait_for_previous(EARLY)
    total = tl.zeros((_ROWS, TOKENS), tl.float32)
    for start in range(0, K, COLUMNS):
        x = tl.load(inputs + start, mask=(row < M)[:, None] & (column < K - start)[None, :], other=0.0)
        w = tl.load(weights + start, mask=(token < V)[None, :] & (column < K - start)[:, None], other=0.0)
        total = tl.dot(x, cast_weight(w, x.dtype), total, input_precision="ieee")
    if scales is not None:
        total *= tl.load(scales + token, mask=token < V, other=0.0)[None, :]
    logit = total.to(hidden.dtype.element_ty).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("inf"))
    logit = tl.where((token < V)[None, :], logit, float("-inf"))
    best = tl.max(logit, 1)
    lowest_id = tl.min(tl.where(logit == best[:, None], token[None, :], _ID_SENTINEL), 1)
    tl.store(maxima + row * tiles + tile, best, mask=row < M)
    tl.store(tokens + row * tiles + tile, lowest_id, mask=row < M)


@triton.jit(do_not_specialize=["tiles"])
def merge_argmax_kernel(maxima, tokens, out, tiles, TILES: tl.constexpr, EARLY: tl.constexpr):
    """Program (row): the token of the largest logit of all tiles."""
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    best = tl.load(maxima + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    token = tl.load(tokens + row * tiles + tile, mask=tile < tiles, other=_ID_SENTINEL)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, token, _ID_SENTINEL), 0)
    tl.store(out + row, tl.where((top > float("-inf")) & (top < float("inf")), chosen, _NO_TOKEN))


def head_tiles(*, weight_bytes: int, capability: int, row_bytes: int = 2) -> Tiles:
    """TILES, with fewer loads in flight on cards with 100 KiB of shared memory, and for float32 weights on all cards; for 8-bit
    weights with float32 rows, FLOAT32_FEW_ROWS. `row_bytes`: bytes of an element of x that is multiplied with 8-bit weights."""
    if weight_bytes == 1 and row_bytes == 4:
        return FLOAT32_FEW_ROWS
    if card(capability).is_small or weight_bytes == 4:
        return replace(TILES, num_stages=4 if weight_bytes == 2 else 3)
    return TILES


def bind_greedy_head(weight: Weight) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """`greedy_head` with this head; None for 4-bit weights, and if the separate product adds in another order, so that near a
    tie the two could choose differently. weight: [V, K], in 8 bits with a scale per token"""
    if isinstance(weight, Int4Weight):
        return None
    values, scales = values_and_scales(weight)
    if not isinstance(weight, torch.Tensor):
        row = torch.empty(1, values.shape[1], dtype=torch.bfloat16, device=values.device)
        if hopper_tiles.supported_separate_tiles(row, weight, values.shape[0]) is not None:
            return None
    weight_bytes, (num_tokens, num_columns) = values.element_size(), values.shape
    card_facts = capability(values.device), multiprocessors(values.device)

    def is_in_order(row_bytes: int) -> bool:
        byte_product = partial(byte_tiles, 1, values.shape, *card_facts, row_bytes=row_bytes)
        product = skinny_tiles(num_tokens, num_columns, *card_facts, weight_bytes) if scales is None else byte_product()
        own = head_tiles(weight_bytes=weight_bytes, capability=card_facts[0], row_bytes=row_bytes)
        return replace(product, num_stages=own.num_stages, block_n=own.block_n) == own

    return partial(greedy_head, weight=weight) if all(map(is_in_order, (2, 4))) else None


def greedy_head(
    hidden: torch.Tensor, weight: torch.Tensor | Int8Weight | Fp8Weight, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Token of each row, or NO_TOKEN: [M] int64, or of `out`'s dtype.

    hidden: [M, K], M ≤ 16, weight: [V, K] of the same type, or in 8 bits with a scale per token.
    """
    values, scales = values_and_scales(weight)
    (rows, num_columns), vocab_size = hidden.shape, values.shape[0]
    assert rows <= FUSED_ROWS_MAX, f"{rows} rows, {FUSED_ROWS_MAX} at most"
    out = torch.empty(rows, dtype=torch.int64, device=hidden.device) if out is None else out
    if rows == 0:
        return out
    row_bytes, number = hidden.element_size(), capability(hidden.device)
    sizes = head_tiles(weight_bytes=values.element_size(), capability=number, row_bytes=row_bytes)
    tiles = triton.cdiv(vocab_size, sizes.block_n)
    maxima = torch.empty(rows, tiles, dtype=torch.float32, device=hidden.device)
    tokens = torch.empty(rows, tiles, dtype=torch.int32, device=hidden.device)
    head_kernel[(tiles,)](
        hidden, values, scales, maxima, tokens, rows, vocab_size, num_columns, hidden.stride(0), values.stride(0), tiles,
        TOKENS=sizes.block_n, COLUMNS=sizes.block_k, num_warps=sizes.num_warps,
        num_stages=sizes.num_stages, **early_launch(hidden.device, rows),
    )  # fmt: skip
    merge_argmax_kernel[(rows,)](
        maxima, tokens, out, tiles, TILES=power_of_two(tiles), num_warps=4, **early_launch(hidden.device, rows)
    )
    return out
