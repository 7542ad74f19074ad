"""Weights in 8 and 4 bits in the form that kernels read, packed from float weights and from AWQ and GPTQ checkpoints.

Every function here runs once, while a model is loaded, on the device of the weights. `kernels.reference.quantised` reads the
layouts bit by bit and shares no code with this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

INT8_MAX = 127
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0

CHUNK_COLUMNS = 128  # columns that are contiguous in the layout of int4 weights
CHUNK_RUNS = 4  # runs of neighbouring columns, each within one group; a word holds one code of each run
RUN_COLUMNS = CHUNK_COLUMNS // CHUNK_RUNS
GROUP_SIZE_MIN = RUN_COLUMNS
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SCALE_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """An int8 weight, w[n, k] = values[n, k] · scales[n]. values: [N, K] int8, scales: [N] float32. Raises ValueError for
    another number of scales: kernels would read beyond them."""

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        _check_row_scales(self.values, self.scales)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """An e4m3 weight, w[n, k] = values[n, k] · scales[n]. values: [N, K] float8_e4m3fn, scales: [N] float32. Raises as
    `Int8Weight`."""

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        _check_row_scales(self.values, self.scales)


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """An int4 weight in groups, w[n, permutation[k]] = (code[n, k] - zero[k // group_size, n]) · scale[k // group_size, n].

    words: [⌈K / 128⌉, N, 32] int16. Word j of chunk c and row n holds at bits 4·r the code of column 128·c + 32·r + j, so
    that one shift and one mask give two codes for neighbouring columns of a group where a register holds two words. A tile of
    rows is one contiguous piece of memory, read 16 bytes at a time, and the columns beyond K are zero.
    scales_zeros: [⌈128·chunks / group_size⌉, N] int32: the 16 bits of the scale, the zero point (0 to 16) above them.
    permutation: [K] int64, or None if the columns are in the checkpoint's order.
    """

    words: torch.Tensor
    scales_zeros: torch.Tensor
    scale_dtype: torch.dtype
    group_size: int
    num_columns: int
    permutation: torch.Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.words.shape[1]


Weight = torch.Tensor | Int8Weight | Fp8Weight | Int4Weight
"""A matrix as products accept it: plain, [N, K], or in one of these forms."""


def values_and_scales(weight: torch.Tensor | Int8Weight | Fp8Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The values or codes of a matrix, [N, K], and the scales of the codes, [N]; None for plain values."""
    return (weight, None) if isinstance(weight, torch.Tensor) else (weight.values, weight.scales)


def pack_int8(weight: torch.Tensor) -> Int8Weight:
    """Quantise a weight, [N, K] float, to symmetric int8 with one scale per row: the largest magnitude becomes 127, ties round
    to even."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / INT8_MAX
    values = (wide / _divisors(scales).unsqueeze(1)).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Int8Weight(values, scales)


def pack_fp8(weight: torch.Tensor) -> Fp8Weight:
    """Quantise a weight, [N, K] float, to e4m3 with one scale per row: the largest magnitude becomes 448."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / FP8_MAX
    values = (wide / _divisors(scales).unsqueeze(1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return Fp8Weight(values, scales)


def pack_int4(weight: torch.Tensor, group_size: int = 128, *, scale_dtype: torch.dtype = torch.float16) -> Int4Weight:
    """Quantise a weight, [N, K] float, to 4 bits with a scale and a zero point for each `group_size` columns of a row.

    Rounds to nearest between the smallest and the largest number of the group, zero included. For weights without a checkpoint
    in 4 bits, and for tests: AWQ and GPTQ choose better codes.
    """
    _check_group_size(group_size)
    num_rows, num_columns = weight.shape
    groups = _pad_columns(weight.float(), group_size).view(num_rows, -1, group_size)
    low, high = groups.amin(dim=2).clamp_(max=0.0), groups.amax(dim=2).clamp_(min=0.0)
    scales = ((high - low) / 15).to(scale_dtype)
    divisors = _divisors(scales.float())
    zeros = (-low / divisors).round_().clamp_(0, 15)
    codes = (groups / divisors.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, 15)
    flat = codes.to(torch.uint8).view(num_rows, -1)[:, :num_columns]
    return pack_int4_codes(flat, scales.T, zeros.T.to(torch.uint8), group_size)


def pack_int4_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_size: int,
    *,
    permutation: torch.Tensor | None = None,
) -> Int4Weight:
    """An `Int4Weight` from existing codes: [N, K] uint8 from 0 to 15.

    scales: [G, N] float16 or bfloat16, zeros: [G, N] integers from 0 to 16. G = ⌈K / group_size⌉; a group size of -1 is one
    group for all columns.
    Raises ValueError where a size does not fit, and for float32 scales that 16 bits cannot hold exactly.
    """
    num_rows, num_columns = codes.shape
    group_size = num_columns if group_size == -1 else group_size
    num_groups = -(-num_columns // group_size)
    for name, tensor in (("scales", scales), ("zeros", zeros)):
        if tensor.shape != (num_groups, num_rows):
            raise ValueError(f"{name} are {list(tensor.shape)}, expected {[num_groups, num_rows]} for {num_columns} columns")
    padded_size = -(-group_size // CHUNK_COLUMNS) * CHUNK_COLUMNS if num_groups == 1 else group_size
    _check_group_size(padded_size)
    num_chunks = -(-num_columns // CHUNK_COLUMNS)
    scale_bits, scale_dtype = _scale_bits(scales)
    meta = scale_bits | (zeros.to(torch.int32) << 16)
    rows = -(-num_chunks * CHUNK_COLUMNS // padded_size)
    scales_zeros = torch.zeros(rows, num_rows, dtype=torch.int32, device=codes.device)
    scales_zeros[:num_groups] = meta
    return Int4Weight(_pack_words(codes), scales_zeros, scale_dtype, padded_size, num_columns, permutation)


def pack_awq(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, group_size: int) -> Int4Weight:
    """An `Int4Weight` of AWQ "gemm" tensors: qweight [K, N / 8] int32, qzeros [K / group, N / 8] int32, scales [K / group, N]
    float16.

    A word holds 8 neighbouring columns of N; bits 4·i to 4·i + 3 hold column AWQ_ORDER[i] of these.
    """
    codes = _unpack_columns(qweight, AWQ_ORDER)
    zeros = _unpack_columns(qzeros, AWQ_ORDER)
    return pack_int4_codes(codes.T, scales, zeros, group_size)


def pack_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    group_size: int,
    *,
    zeros_minus_one: bool = True,
) -> Int4Weight:
    """An `Int4Weight` of GPTQ tensors: qweight [K / 8, N] int32, qzeros [G, N / 8] int32, scales [G, N], g_idx [K] the group of
    each column of K.

    The first format (`checkpoint_format` "gptq") stores zero points minus one, "gptq_v2" stores them as they are. Columns in
    the order of their activations (`desc_act`) are sorted by group here, and x is permuted likewise when it is multiplied.
    Raises ValueError for groups of unequal size.
    """
    codes = _unpack_rows(qweight)
    zeros = _unpack_columns(qzeros, tuple(range(8))) + int(zeros_minus_one)
    permutation = None if g_idx is None else _permutation(g_idx, codes.shape[0] if group_size == -1 else group_size)
    if permutation is not None:
        codes = codes.index_select(0, permutation)
    return pack_int4_codes(codes.T, scales, zeros, group_size, permutation=permutation)


def _permutation(g_idx: torch.Tensor, group_size: int) -> torch.Tensor | None:
    """The columns sorted by group, stable; None when they are sorted already."""
    expected = torch.arange(g_idx.numel(), device=g_idx.device) // group_size
    groups = g_idx.to(torch.int64)
    if torch.equal(groups, expected):
        return None
    ordered, permutation = groups.sort(stable=True)
    if not torch.equal(ordered, expected):
        raise ValueError(f"g_idx does not divide {g_idx.numel()} columns into groups of {group_size}")
    return permutation


def _pack_words(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] uint8 → [⌈K / 128⌉, N, 32] int16"""
    runs = _pad_columns(codes, CHUNK_COLUMNS).view(codes.shape[0], -1, CHUNK_RUNS, RUN_COLUMNS)
    words = torch.zeros(runs.shape[1], runs.shape[0], RUN_COLUMNS, dtype=torch.int16, device=codes.device)
    for run in range(CHUNK_RUNS):
        words |= runs[:, :, run].transpose(0, 1).to(torch.int16) << (4 * run)
    return words


def int4_scale_dtype(scales: torch.Tensor) -> torch.dtype:
    """The 16-bit dtype that holds these scales exactly, as `Int4Weight` keeps them. Raises ValueError where there is none."""
    if scales.dtype in SCALE_DTYPES:
        return scales.dtype
    for dtype in SCALE_DTYPES:
        if torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return dtype
    raise ValueError(f"scales of {scales.dtype} that neither float16 nor bfloat16 holds exactly")


def _scale_bits(scales: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """The 16 bits of each scale as a non-negative int32, and the dtype of the scale."""
    dtype = int4_scale_dtype(scales)
    return scales.to(dtype).contiguous().view(torch.int16).to(torch.int32) & 0xFFFF, dtype


def _unpack_columns(packed: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """[R, C] int32 → [R, 8·C] uint8; bits 4·i to 4·i + 3 of a word hold its column order[i]"""
    values = torch.empty(*packed.shape, 8, dtype=torch.uint8, device=packed.device)
    for position, column in enumerate(order):
        values[:, :, column] = ((packed >> (4 * position)) & 15).to(torch.uint8)
    return values.flatten(1)


def _unpack_rows(packed: torch.Tensor) -> torch.Tensor:
    """[R, C] int32 → [8·R, C] uint8; bits 4·i to 4·i + 3 of a word hold its row i"""
    values = torch.empty(packed.shape[0], 8, packed.shape[1], dtype=torch.uint8, device=packed.device)
    for position in range(8):
        values[:, position] = ((packed >> (4 * position)) & 15).to(torch.uint8)
    return values.flatten(0, 1)


def _pad_columns(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    """[N, K] → [N, K rounded up], padded with zeros"""
    padding = -rows.shape[1] % multiple
    return torch.nn.functional.pad(rows, (0, padding)) if padding else rows


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    """The divisors of rows: a row of zeros has the scale zero and is divided by one."""
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _check_row_scales(values: torch.Tensor, scales: torch.Tensor) -> None:
    if scales.shape != values.shape[:1]:
        raise ValueError(f"scales are {list(scales.shape)}, expected one for each row: {list(values.shape[:1])}")


def _check_group_size(group_size: int) -> None:
    if group_size < GROUP_SIZE_MIN or (CHUNK_COLUMNS % group_size and group_size % CHUNK_COLUMNS):
        raise ValueError(
            f"groups of {group_size} columns are not supported: 32, 64 and multiples of 128 are, and a single group"
        )
