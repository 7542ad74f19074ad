"""Tiles of keys and values of a split, attended by the newest queries of its request: the loop of `attention_decode`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.e4m3_pairs import e4m3_pairs
from kernels.triton.newest_token import score_of


@triton.jit
def see_nothing(queries, kv_cache, TILE: tl.constexpr):
    """→ what `attend` begins with: sums of values of even and odd columns, weights and the largest score."""
    FP8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
    ROWS: tl.constexpr = queries.shape[0]
    VALUES: tl.constexpr = queries.shape[1] // 2 if FP8 else queries.shape[1]
    found = tl.zeros([ROWS, VALUES], tl.float32)
    return found, found, tl.zeros([ROWS, TILE], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)


@triton.jit
def _places(block, block_stride, start, column, TOKEN_STRIDE: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr):
    """Where the tokens of a tile lie. It begins at a multiple of its length, so what it is of whole blocks, or which part of a
    block, needs no division."""
    at_block = block.to(tl.uint32).to(tl.uint64) * block_stride.to(tl.uint32).to(tl.uint64)  # one wide product of 32 bits
    if TILE >= P:
        place = at_block.to(tl.int64) + (column % P) * TOKEN_STRIDE
    else:
        place = at_block.to(tl.int64) + (start % P + column) * TOKEN_STRIDE
    return place


@triton.jit
def attend(
    queries, seen_before, block, keys, table, begin, end, oldest_seen, seen, scale, block_stride,
    TOKEN_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr, D: tl.constexpr, P: tl.constexpr, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tokens begin … end - 1 of one request and one key head, behind what was seen before: sum of weighted values, weights that
    are still to be added up by row, and the largest score. Of an fp8 cache the values of even and of odd columns stand apart.
    block: of the first tile's tokens."""
    WIDTH: tl.constexpr = queries.shape[1]
    FP8: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8
    DOT: tl.constexpr = tl.float16 if FP8 else keys.dtype.element_ty
    VALUES: tl.constexpr = WIDTH // 2 if FP8 else WIDTH
    queries = queries.to(DOT)
    column = tl.arange(0, TILE)
    lane = tl.arange(0, WIDTH)
    pair = tl.arange(0, VALUES)
    found, found_odd, weights, largest = seen_before
    # The blocks of a tile are asked for while the tile before is at work.
    for start in range(begin, end, TILE):
        token = start + column
        held = token < end
        if WINDOW > 0:
            held = held & (token >= oldest_seen - WINDOW)
        place = _places(block, block_stride, start, column, TOKEN_STRIDE, P, TILE)
        block = tl.load(table + (start + TILE) // P + column // P, mask=token + TILE < end, other=0)
        # Whatever lies in a key that is not held, its score is replaced; a value would spoil the sum even with no weight.
        places = keys + place[:, None] + lane[None, :]
        key = tl.load(places) if WIDTH == D else tl.load(places, mask=(lane < D)[None, :], other=0.0)
        score = score_of(tl.dot(queries, tl.trans(key.to(DOT)), input_precision="ieee"), scale, SOFTCAP)
        visible = held[None, :]
        if QUERIES > 1:
            visible = visible & (token[None, :] < seen[:, None])
            if WINDOW > 0:
                visible = visible & (token[None, :] >= (seen - WINDOW)[:, None])
        score = tl.where(visible, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 1))
        # Nothing seen yet: any number in the place of -inf makes all weights zero instead of NaN.
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(score - base[:, None])
        faded = tl.exp2(largest - base)
        weights = weights * faded[:, None] + weight
        weight = weight.to(DOT)
        if FP8:
            twos = (keys + VALUE_OFFSET + place).to(tl.pointer_type(tl.uint16))[:, None] + pair[None, :]
            two = tl.load(twos, mask=held[:, None] & (pair < D // 2)[None, :], other=0)
            even, odd = e4m3_pairs(two)
            found = tl.dot(weight, even, found * faded[:, None])
            found_odd = tl.dot(weight, odd, found_odd * faded[:, None])
        else:
            value = tl.load(places + VALUE_OFFSET, mask=held[:, None] & (lane < D)[None, :], other=0.0)
            found = tl.dot(weight, value, found * faded[:, None], input_precision="ieee")
        largest = larger
    return found, found_odd, weights, largest


@triton.jit
def attend_columns(
    queries, seen_before, block, keys, table, begin, end, oldest_seen, seen, scale, block_stride,
    TOKEN_STRIDE: tl.constexpr, VALUE_OFFSET: tl.constexpr, D: tl.constexpr, P: tl.constexpr, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As `attend`, of few queries over an fp8 cache, which are columns of the products; their rows are tokens, then numbers of
    values. Keys are taken apart into even and odd numbers, as values are."""
    VALUES: tl.constexpr = queries.shape[1] // 2
    even_queries, odd_queries = tl.split(tl.reshape(queries.to(tl.float16), [queries.shape[0], VALUES, 2]))
    even_queries, odd_queries = tl.trans(even_queries), tl.trans(odd_queries)
    column = tl.arange(0, TILE)
    pair = tl.arange(0, VALUES)
    found, found_odd, weights, largest = seen_before
    found, found_odd, weights = tl.trans(found), tl.trans(found_odd), tl.trans(weights)
    for start in range(begin, end, TILE):
        token = start + column
        held = token < end
        if WINDOW > 0:
            held = held & (token >= oldest_seen - WINDOW)
        place = _places(block, block_stride, start, column, TOKEN_STRIDE, P, TILE)
        block = tl.load(table + (start + TILE) // P + column // P, mask=token + TILE < end, other=0)
        twos = (keys + place).to(tl.pointer_type(tl.uint16))[:, None] + pair[None, :]
        two = tl.load(twos) if VALUES * 2 == D else tl.load(twos, mask=(pair < D // 2)[None, :], other=0)
        even, odd = e4m3_pairs(two)
        score = score_of(tl.dot(odd, odd_queries, tl.dot(even, even_queries)), scale, SOFTCAP)
        visible = held[:, None]
        if QUERIES > 1:
            visible = visible & (token[:, None] < seen[None, :])
            if WINDOW > 0:
                visible = visible & (token[:, None] >= (seen - WINDOW)[None, :])
        score = tl.where(visible, score, float("-inf"))
        larger = tl.maximum(largest, tl.max(score, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight = tl.exp2(score - base[None, :])
        faded = tl.exp2(largest - base)
        weights = weights * faded[None, :] + weight
        weight = weight.to(tl.float16)
        # Loaded with a column for each token, as the product takes them.
        twos = (keys + VALUE_OFFSET + place).to(tl.pointer_type(tl.uint16))[None, :] + pair[:, None]
        even, odd = e4m3_pairs(tl.load(twos, mask=held[None, :] & (pair < D // 2)[:, None], other=0))
        found = tl.dot(even, weight, found * faded[None, :])
        found_odd = tl.dot(odd, weight, found_odd * faded[None, :])
        largest = larger
    return tl.trans(found), tl.trans(found_odd), tl.trans(weights), largest
