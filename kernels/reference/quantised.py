"""The values of quantised weights, each layout read element by element, exactly, in float32; and products with them.

The layouts of checkpoints are read as their authors published them: AWQ (arXiv 2306.00978, its "gemm" packing), GPTQ
(arXiv 2210.17323, as its first implementations pack it). Nothing here is shared with the packing functions.
"""

from __future__ import annotations

import torch

from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, Weight


def nibble(word: int, position: int) -> int:
    """Bits 4·position to 4·position + 3 of a word of 32 bits."""
    return (word & 0xFFFFFFFF) >> (4 * position) & 15


def dequantise_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> torch.Tensor:
    """Values of AWQ tensors.

    qweight: [K, N/8] int32, qzeros: [G, N/8] int32, scales: [G, N] → [N, K] float32: (code - zero) · scale

    Even outputs come first: the nibbles of a word are the outputs 0 2 4 6 1 3 5 7 of 8 neighbours.
    """
    num_columns, num_words = qweight.shape
    group_size = num_columns if group_size == -1 else group_size
    words, zero_words = qweight.tolist(), qzeros.tolist()
    dequantised = torch.empty(num_words * 8, num_columns)
    for row in range(num_words * 8):
        position = [0, 2, 4, 6, 1, 3, 5, 7].index(row % 8)
        for column in range(num_columns):
            group = column // group_size
            code = nibble(words[column][row // 8], position)
            zero = nibble(zero_words[group][row // 8], position)
            dequantised[row, column] = (code - zero) * scales[group, row].float()
    return dequantised


def dequantise_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    group_size: int,
    *,
    zeros_minus_one: bool = True,
) -> torch.Tensor:
    """Values of GPTQ tensors.

    qweight: [K/8, N] int32, qzeros: [G, N/8] int32, scales: [G, N], g_idx: [K] → [N, K] float32: (code - zero) · scale

    Without g_idx column k belongs to group k // group_size. The first format stores each zero point minus one.
    """
    num_columns, num_rows = qweight.shape[0] * 8, qweight.shape[1]
    group_size = num_columns if group_size == -1 else group_size
    groups = [column // group_size for column in range(num_columns)] if g_idx is None else g_idx.tolist()
    words, zero_words = qweight.tolist(), qzeros.tolist()
    dequantised = torch.empty(num_rows, num_columns)
    for row in range(num_rows):
        for column, group in enumerate(groups):
            code = nibble(words[column // 8][row], column % 8)
            zero = nibble(zero_words[group][row // 8], row % 8) + int(zeros_minus_one)
            dequantised[row, column] = (code - zero) * scales[group, row].float()
    return dequantised


def dequantise(weight: Weight) -> torch.Tensor:
    """The values of a weight: [N, K] float32, columns in the checkpoint's order"""
    if isinstance(weight, Int4Weight):
        return _dequantise_int4(weight)
    return weight.float() if isinstance(weight, torch.Tensor) else weight.values.float() * weight.scales.unsqueeze(1)


def _dequantise_int4(weight: Int4Weight) -> torch.Tensor:
    """See `Int4Weight` for the layout."""
    dequantised = torch.empty(weight.num_rows, weight.num_columns, device=weight.words.device)
    for column in range(weight.num_columns):
        chunk, within = divmod(column, 128)
        run, word = divmod(within, 32)
        codes = (weight.words[chunk, :, word].long() & 0xFFFF) >> (4 * run) & 15
        meta = weight.scales_zeros[column // weight.group_size]
        scales = (meta & 0xFFFF).to(torch.int16).view(weight.scale_dtype).float()
        original = column if weight.permutation is None else int(weight.permutation[column])
        dequantised[:, original] = (codes - (meta >> 16)).float() * scales
    return dequantised


def linear_int8(
    x: torch.Tensor, weight: Int8Weight, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Product with an int8 weight. x: [M, K] → x Wᵀ + bias: [M, N] like x"""
    return _product(x, dequantise(weight), bias, out)


def linear_int4(
    x: torch.Tensor, weight: Int4Weight, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Product with an int4 weight. x: [M, K] → x Wᵀ + bias: [M, N] like x"""
    return _product(x, dequantise(weight), bias, out)


def linear_fp8(
    x: torch.Tensor,
    weight: Fp8Weight,
    *,
    x_scales: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Product with an e4m3 weight.

    x: [M, K] float8_e4m3fn with x_scales [M, 1] or [1], or a float x without → x Wᵀ + bias: [M, N], like x or `out_dtype`
    """
    wide = x.float() if x_scales is None else x.float() * x_scales.float()
    return _product(wide, dequantise(weight), bias, out, out_dtype or x.dtype)


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    exact = x.double() @ weight.double().T
    product = (exact if bias is None else exact + bias.double()).to(dtype or x.dtype)
    return product if out is None else out.copy_(product)
