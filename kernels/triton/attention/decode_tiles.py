"""The loop of decode.py: online softmax over a split's tiles of keys and values, for its request's newest queries."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.e4m3_pairs import e4m3_pairs
from kernels.triton.attention.newest_token import scaled_score


@triton.jit
def empty_softmax_state(queries, kv_cache, TILE: tl.constexpr):
    """→ the initial state of `attend`: accumulators of even and odd columns, sums of weights and the row maxima."""
    FP8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
    ROWS: tl.constexpr = queries.shape[0]
    VALUES: tl.constexpr = queries.shape[1] // 2 if FP8 else queries.shape[1]
    acc = tl.zeros([ROWS, VALUES], tl.float32)
    return acc, acc, tl.zeros([ROWS, TILE], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)


@triton.jit
def _token_offsets(block, block_stride, start, column, TOKEN_STRIDE: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr):
    """→ the offsets of a tile's tokens in the cache: [TILE] int64. A tile begins at a multiple of its length: it consists of
    whole blocks or lies within one, so no further division is needed."""
    block_offsets = block.to(tl.uint32).to(tl.uint64) * block_stride.to(tl.uint32).to(tl.uint64)  # one widening 32-bit product
    if TILE >= P:
        offsets = block_offsets.to(tl.int64) + (column % P) * TOKEN_STRIDE
    else:
        offsets = block_offsets.to(tl.int64) + (start % P + column) * TOKEN_STRIDE
    return offsets


@triton.jit
def attend(
    queries, state, block, keys, table, begin, end, min_visible_end, visible_end, scale, block_stride,
    TOKEN_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr, D: tl.constexpr, P: tl.constexpr, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Continues an online softmax over tokens begin … end - 1 of one request and KV head. state, and the result: accumulators
    of weighted values [ROWS, WIDTH], sums of weights [ROWS, TILE], which are yet to be added up by row, and row maxima [ROWS].
    With an fp8 cache, the first accumulator has the even columns and the second the odd ones, [ROWS, WIDTH / 2] each; else the
    second is unused. block: of the first tile's tokens. visible_end: [ROWS], the end of the tokens that a query attends to;
    min_visible_end: its minimum."""
    WIDTH: tl.constexpr = queries.shape[1]
    FP8: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    DOT: tl.constexpr = tl.float16 if FP8 else keys.dtype.element_ty
    VALUES: tl.constexpr = WIDTH // 2 if FP8 else WIDTH
    queries = queries.to(DOT)
    column = tl.arange(0, TILE)
    lane = tl.arange(0, WIDTH)
    pair = tl.arange(0, VALUES)
    acc, acc_odd, weight_sums, row_max = state
    # Block numbers are loaded one tile ahead.
    for start in range(begin, end, TILE):
        token = start + column
        in_range = token < end
        if WINDOW > 0:
            in_range = in_range & (token >= min_visible_end - WINDOW)
        offsets = _token_offsets(block, block_stride, start, column, TOKEN_STRIDE, P, TILE)
        block = tl.load(table + (start + TILE) // P + column // P, mask=token + TILE < end, other=0)
        # Keys out of range need no mask, as their scores are replaced. Values do: even with weight 0, NaN would spoil the sum.
        key_ptrs = keys + offsets[:, None] + lane[None, :]
        key = tl.load(key_ptrs) if WIDTH == D else tl.load(key_ptrs, mask=(lane < D)[None, :], other=0.0)
        score = scaled_score(tl.dot(queries, tl.trans(key.to(DOT)), input_precision="ieee"), scale, SOFTCAP)
        visible = in_range[None, :]
        if QUERIES > 1:
            visible = visible & (token[None, :] < visible_end[:, None])
            if WINDOW > 0:
                visible = visible & (token[None, :] >= (visible_end - WINDOW)[:, None])
        score = tl.where(visible, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        # Before the first visible key the maximum is -inf: subtracting 0 instead gives weights of zero, not NaN.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(score - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        weight_sums = weight_sums * rescale[:, None] + weight
        weight = weight.to(DOT)
        if FP8:
            pair_ptrs = (keys + VALUE_OFFSET + offsets).to(tl.pointer_type(tl.uint16))[:, None] + pair[None, :]
            packed = tl.load(pair_ptrs, mask=in_range[:, None] & (pair < D // 2)[None, :], other=0)
            even, odd = e4m3_pairs(packed)
            acc = tl.dot(weight, even, acc * rescale[:, None])
            acc_odd = tl.dot(weight, odd, acc_odd * rescale[:, None])
        else:
            value = tl.load(key_ptrs + VALUE_OFFSET, mask=in_range[:, None] & (lane < D)[None, :], other=0.0)
            acc = tl.dot(weight, value, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    return acc, acc_odd, weight_sums, row_max


@triton.jit
def attend_columns(
    queries, state, block, keys, table, begin, end, min_visible_end, visible_end, scale, block_stride,
    TOKEN_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr, D: tl.constexpr, P: tl.constexpr, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As `attend`, for few queries over an fp8 cache: queries are the columns of the products, whose rows are tokens, then
    value columns. Keys, like values, are unpacked into even and odd columns."""
    VALUES: tl.constexpr = queries.shape[1] // 2
    even_queries, odd_queries = tl.split(tl.reshape(queries.to(tl.float16), [queries.shape[0], VALUES, 2]))
    even_queries, odd_queries = tl.trans(even_queries), tl.trans(odd_queries)
    column = tl.arange(0, TILE)
    pair = tl.arange(0, VALUES)
    acc, acc_odd, weight_sums, row_max = state
    acc, acc_odd, weight_sums = tl.trans(acc), tl.trans(acc_odd), tl.trans(weight_sums)
    for start in range(begin, end, TILE):
        token = start + column
        in_range = token < end
        if WINDOW > 0:
            in_range = in_range & (token >= min_visible_end - WINDOW)
        offsets = _token_offsets(block, block_stride, start, column, TOKEN_STRIDE, P, TILE)
        block = tl.load(table + (start + TILE) // P + column // P, mask=token + TILE < end, other=0)
        pair_ptrs = (keys + offsets).to(tl.pointer_type(tl.uint16))[:, None] + pair[None, :]
        packed = tl.load(pair_ptrs) if VALUES * 2 == D else tl.load(pair_ptrs, mask=(pair < D // 2)[None, :], other=0)
        even, odd = e4m3_pairs(packed)
        score = scaled_score(tl.dot(odd, odd_queries, tl.dot(even, even_queries)), scale, SOFTCAP)
        visible = in_range[:, None]
        if QUERIES > 1:
            visible = visible & (token[:, None] < visible_end[None, :])
            if WINDOW > 0:
                visible = visible & (token[:, None] >= (visible_end - WINDOW)[None, :])
        score = tl.where(visible, score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight = tl.exp2(score - safe_max[None, :])
        rescale = tl.exp2(row_max - safe_max)
        weight_sums = weight_sums * rescale[None, :] + weight
        weight = weight.to(tl.float16)
        # Loaded transposed, [WIDTH / 2, TILE], as the left operand of the product.
        pair_ptrs = (keys + VALUE_OFFSET + offsets).to(tl.pointer_type(tl.uint16))[None, :] + pair[:, None]
        even, odd = e4m3_pairs(tl.load(pair_ptrs, mask=in_range[None, :] & (pair < D // 2)[:, None], other=0))
        acc = tl.dot(even, weight, acc * rescale[None, :])
        acc_odd = tl.dot(odd, weight, acc_odd * rescale[None, :])
        row_max = new_max
    return tl.trans(acc), tl.trans(acc_odd), tl.trans(weight_sums), row_max
