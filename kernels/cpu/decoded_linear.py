"""Products with weights of 8 and 4 bits by decoding some rows of them at a time: any device, right rather than fast.

What is decoded at once stays in the cache of a core, so a product costs little more than its decoding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.cpu.fp8_decode import decode_fp8
from kernels.quantised_weights import CHUNK_COLUMNS, PLANES, Fp8Weight, Int4Weight, Int8Weight

DECODED_ELEMENTS = 1 << 18
"""Weights that stand decoded at a time: a megabyte in float32."""


def linear_int8(
    x: torch.Tensor, weight: Int8Weight, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [M, K] → x Wᵀ + bias: [M, N] like x; scales are applied to the products, in float32"""
    product = _by_rows(x.float(), weight.values.shape[0], lambda first, last: weight.values[first:last].float())
    return _finished(product.mul_(weight.scales), bias, x.dtype, out)


def linear_fp8(
    x: torch.Tensor,
    weight: Fp8Weight,
    *,
    x_scales: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: [M, K] float8_e4m3fn with x_scales [M, 1] or [1], or a float x without → x Wᵀ + bias: [M, N], like x or `out_dtype`"""
    rows = decode_fp8(x, torch.float32) if x.dtype.itemsize == 1 else x.float()
    product = _by_rows(rows, weight.values.shape[0], lambda first, last: decode_fp8(weight.values[first:last], torch.float32))
    scales = weight.scales if x_scales is None else weight.scales * x_scales
    return _finished(product.mul_(scales), bias, out_dtype or x.dtype, out)


def linear_int4(
    x: torch.Tensor, weight: Int4Weight, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [M, K] → x Wᵀ + bias: [M, N] like x"""
    columns = x if weight.permutation is None else x.index_select(1, weight.permutation)
    product = _by_rows(columns.float(), weight.num_rows, lambda first, last: decode_int4(weight, first, last))
    return _finished(product, bias, x.dtype, out)


def decode_int4(weight: Int4Weight, first: int, last: int) -> torch.Tensor:
    """Rows `first` to `last` - 1, columns sorted by group: [last - first, K] float32, see `Int4Weight`"""
    words = weight.words[:, first:last]
    codes = torch.empty(last - first, words.shape[0], len(PLANES), words.shape[2], device=words.device)
    for position, plane in enumerate(PLANES):
        codes[:, :, plane] = words.bitwise_right_shift(4 * position).bitwise_and_(15).transpose(0, 1)
    meta = weight.scales_zeros[:, first:last].T
    scales = meta.bitwise_and(0xFFFF).to(torch.int16).view(weight.scale_dtype).float()
    zeros = meta.bitwise_right_shift(16).float()
    groups = codes.view(last - first, -1, min(weight.group_size, words.shape[0] * CHUNK_COLUMNS))
    groups.sub_(zeros[:, : groups.shape[1], None]).mul_(scales[:, : groups.shape[1], None])
    return codes.view(last - first, -1)[:, : weight.num_columns]


def _by_rows(x: torch.Tensor, num_rows: int, decode: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """x: [M, K] float32 → [M, N] float32; 16 bits would overflow before the scales are applied, and are slow here."""
    step = max(1, DECODED_ELEMENTS // x.shape[1])
    if step >= num_rows:
        return functional.linear(x, decode(0, num_rows))
    product = x.new_empty(x.shape[0], num_rows)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        product[:, first:last] = functional.linear(x, decode(first, last))
    return product


def _finished(product: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, out: torch.Tensor | None) -> torch.Tensor:
    whole = (product if bias is None else product.add_(bias)).to(dtype)
    return whole if out is None else out.copy_(whole)
