"""The output head and its argmax in one: the most likely token of a few rows without their logits ever being written.

Formula. argmax_v round(Σ_k hidden[m, k] · weight[v, k]), the lowest id among equals, rounded to the type of the weights as the
logits of a separate product would be; sums in float32, columns in the order of `kernels.triton.linear` without splits.
Memory: 2·V·K bytes of weights once (1.05 GB for Llama-3.1-8B, 0.24 ms at 4.3 TB/s), 8 bytes a row for each of V / 64 parts,
which `join` reads; a separate product writes and reads logits. 2·M·V·K operations on tensor cores, tiles of
16 rows whatever M is. Rows beyond M and tokens beyond V are masked. A row with NaN or +inf, or with nothing above -inf, has
NO_TOKEN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from kernels.race import NO_TOKEN
from kernels.triton.compilation import Compilation
from kernels.triton.early_launch import early_launch, fetch_rows, let_next_start, start_in_turn, wait_for_previous
from kernels.triton.linear import skinny_tiles
from kernels.triton.tuning import capability, multiprocessors, power_of_two

ROWS_MAX = 16
_TOKENS = 64
_COLUMNS = 128
_ROWS = tl.constexpr(ROWS_MAX)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_NOBODY = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["M", "V", "tiles"])
def head_kernel(
    hidden, weight, maxima, tokens, M, V, K, hidden_stride, weight_stride, tiles, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile): the largest logit of TOKENS tokens in each row; +inf stands for one that is not finite above."""
    let_next_start(EARLY)
    tile = tl.program_id(0)
    row = tl.arange(0, _ROWS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    weights = weight + token.to(tl.int64)[:, None] * weight_stride + column[None, :]
    inputs = hidden + row[:, None] * hidden_stride + column[None, :]
    if EARLY:
        rows = weight + tl.minimum(token, V - 1).to(tl.int64) * weight_stride
        for step in tl.static_range(4):
            fetch_rows(rows, step * COLUMNS, K, COLUMNS, EARLY)
    wait_for_previous(EARLY)
    total = tl.zeros([_ROWS, TOKENS], tl.float32)
    for start in range(0, K, COLUMNS):
        left = column < K - start
        x = tl.load(inputs + start, mask=(row < M)[:, None] & left[None, :], other=0.0)
        w = tl.load(weights + start, mask=(token < V)[:, None] & left[None, :], other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    logit = total.to(weight.dtype.element_ty).to(tl.float32)
    logit = tl.where(logit == logit, logit, float("inf"))
    logit = tl.where((token < V)[None, :], logit, float("-inf"))
    best = tl.max(logit, 1)
    first = tl.min(tl.where(logit == best[:, None], token[None, :], _NOBODY), 1)
    tl.store(maxima + row * tiles + tile, best, mask=row < M)
    tl.store(tokens + row * tiles + tile, first, mask=row < M)


@triton.jit(do_not_specialize=["tiles"])
def join_kernel(maxima, tokens, out, tiles, TILES: tl.constexpr, EARLY: tl.constexpr):
    """Program (row): the largest of all tiles."""
    start_in_turn(EARLY)
    row = tl.program_id(0)
    tile = tl.arange(0, TILES)
    best = tl.load(maxima + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    token = tl.load(tokens + row * tiles + tile, mask=tile < tiles, other=_NOBODY)
    top = tl.max(best, 0)
    chosen = tl.min(tl.where(best == top, token, _NOBODY), 0)
    tl.store(out + row, tl.where((top > float("-inf")) & (top < float("inf")), chosen, _NO_TOKEN))


def _stages(capability: int) -> int:
    return 4 if capability in (86, 89, 120) else 6


def bind_greedy_head(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """`greedy_head` with this head; None where `kernels.triton.linear` adds in another order, so that near a tie the two could
    choose differently. weight: [V, K]"""
    device = weight.device
    tiles = skinny_tiles(weight.shape[0], weight.shape[1], capability(device), multiprocessors(device))
    if (tiles.block_n, tiles.block_k, tiles.splits) != (_TOKENS, _COLUMNS, 1):
        return None
    return partial(greedy_head, weight=weight)


def greedy_head(hidden: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Token of each row, or NO_TOKEN: [M] int64, or as `out` is.

    hidden: [M, K], M ≤ 16, weight: [V, K], both of one type.
    """
    (rows, num_columns), vocab_size = hidden.shape, weight.shape[0]
    assert rows <= ROWS_MAX, f"{rows} rows, {ROWS_MAX} at most"
    out = torch.empty(rows, dtype=torch.int64, device=hidden.device) if out is None else out
    if rows == 0:
        return out
    tiles = triton.cdiv(vocab_size, _TOKENS)
    maxima = torch.empty(rows, tiles, dtype=torch.float32, device=hidden.device)
    tokens = torch.empty(rows, tiles, dtype=torch.int32, device=hidden.device)
    head_kernel[(tiles,)](
        hidden, weight, maxima, tokens, rows, vocab_size, num_columns, hidden.stride(0), weight.stride(0), tiles,
        TOKENS=_TOKENS, COLUMNS=_COLUMNS, num_warps=4, num_stages=_stages(capability(hidden.device)),
        **early_launch(hidden.device),
    )  # fmt: skip
    join_kernel[(rows,)](maxima, tokens, out, tiles, TILES=power_of_two(tiles), num_warps=4, **early_launch(hidden.device))
    return out


def compilations() -> list[Compilation]:
    """Llama-3 and Qwen3 vocabularies."""
    parts = {"maxima": "*fp32", "tokens": "*i32"}
    numbers = dict.fromkeys(("M", "V", "K", "hidden_stride", "weight_stride", "tiles"), "i32")
    found = [
        Compilation(
            f"greedy_head: {dtype}",
            head_kernel,
            {"hidden": f"*{dtype}", "weight": f"*{dtype}", **parts, **numbers},
            {"TOKENS": _TOKENS, "COLUMNS": _COLUMNS},
            num_warps=4,
            num_stages=4,
            tensor_cores=True,
            small_tile=True,
            spill_bytes_max=16,  # kept from before the loop until behind it, for a third program on a multiprocessor
            divisible=("K", "hidden_stride", "weight_stride"),
        )
        for dtype in ("bf16", "fp16")
    ]
    join = {**parts, "out": "*i64", "tiles": "i32"}
    return [*found, Compilation("greedy_head: join", join_kernel, join, {"TILES": 2048}, num_warps=4)]
