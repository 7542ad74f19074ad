"""Gathers rows of the embedding by token, times its multiplier, and rows of cosines and sines by position."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.launching.card_properties import power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous

BLOCK_MAX = 1024
"""Columns of a program of four warps: eight per thread, 16 bytes in 16 bits."""


@triton.jit
def embed_kernel(
    token_ids, table, out, multiplier, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr
):
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    token = tl.load(token_ids + row).to(tl.int64)
    value = tl.load(table + token * WIDTH + columns, mask=mask, other=0.0)
    if SCALED:
        value = (value.to(tl.float32) * multiplier).to(table.dtype.element_ty)
    tl.store(out + row * WIDTH + columns, value, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def rotation_rows_kernel(
    cos, sin, positions, cos_out, sin_out, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)
    position = tl.load(positions + rows, mask=rows < num_rows, other=0).to(tl.int64)[:, None]
    cosine = tl.load(cos + position * WIDTH + columns, mask=mask, other=0.0)
    sine = tl.load(sin + position * WIDTH + columns, mask=mask, other=0.0)
    tl.store(cos_out + rows[:, None] * WIDTH + columns, cosine, mask=mask)
    tl.store(sin_out + rows[:, None] * WIDTH + columns, sine, mask=mask)


def embed(
    token_ids: torch.Tensor, table: torch.Tensor, *, multiplier: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """table[token_ids] · multiplier: token_ids: [T] int64 or int32, table: [V, hidden] fp32, fp16 or bf16 → [T, hidden]

    Reads and writes T · hidden elements and reads T ids; at most one product per element, in float32, rounded once. Columns
    beyond `hidden` are masked; ids are not checked.
    """
    num_rows, width = token_ids.shape[0], table.shape[1]
    rows = torch.empty(num_rows, width, dtype=table.dtype, device=table.device) if out is None else out
    block = min(BLOCK_MAX, power_of_two(width))
    if num_rows:
        grid = (num_rows, triton.cdiv(width, block))
        embed_kernel[grid](
            token_ids, table, rows, multiplier, width, block, multiplier != 1.0,
            num_warps=4, **early_launch(table.device, num_rows),
        )  # fmt: skip
    return rows


def rotation_rows(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, *, out: tuple[torch.Tensor, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos[positions], sin[positions]: both tables [max_len, 1, r], positions: [T] int64 or int32 → both [T, 1, r]

    Looked up once per step, so that layers need not load a position before they can load its angle. Reads and writes 2 · T · r
    elements. Columns beyond r and rows beyond T are masked; positions are not checked.
    """
    num_rows, width = positions.shape[0], cos.shape[-1]
    shape = (num_rows, 1, width)
    cosines, sines = (torch.empty(shape, dtype=cos.dtype, device=cos.device) for _ in "cs") if out is None else out
    block = power_of_two(width)
    rows = rotation_rows_tile(block)
    if num_rows:
        grid = (triton.cdiv(num_rows, rows),)
        rotation_rows_kernel[grid](
            cos, sin, positions, cosines, sines, num_rows, width, block, rows, num_warps=1, **early_launch(cos.device, num_rows)
        )
    return cosines, sines


def rotation_rows_tile(block: int) -> int:
    """16 bytes per thread of a warp, from each table."""
    return max(1, 256 // block)
