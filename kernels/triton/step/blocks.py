"""Moves whole KV blocks: within the cache, and through a staging buffer in which all layers of a block are contiguous.

One launch moves the blocks of all layers. The kernels are independent of the dtype: a block is contiguous memory in words of 8
bytes, two per load. The staging buffer may be page-locked host memory, which a GPU accesses directly over the bus, so scattered
blocks of the cache are copied to scattered rows of a host tier without an intermediate copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

WORD_BYTES = 8
BLOCK = 2048
"""Words per program: 16 KB, eight loads of 16 bytes per thread."""
NUM_WARPS = 4


@triton.jit
def _cache_words(addresses, layer):
    """→ the cache of one layer in words of 8 bytes. addresses: [layers] int64"""
    return tl.multiple_of(tl.load(addresses + layer).to(tl.pointer_type(tl.int64)), 16)


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
def copy_blocks_kernel(addresses, sources, targets, block_words, block_stride, BLOCK: tl.constexpr):
    cache = _cache_words(addresses, tl.program_id(1))
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = word < block_words
    tl.store(cache + target * block_stride + word, tl.load(cache + source * block_stride + word, mask=mask), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["blocks", "rows"])
def stage_blocks_kernel(
    addresses, blocks, staging, rows, block_words, block_stride, num_layers, BLOCK: tl.constexpr, TO_STAGING: tl.constexpr
):
    layer = tl.program_id(1)
    cache = _cache_words(addresses, layer)
    block = tl.load(blocks + tl.program_id(0)).to(tl.int64)
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = word < block_words
    cache_ptrs = cache + block * block_stride + word
    staging_ptrs = staging + (row * num_layers + layer) * block_words + word
    if TO_STAGING:
        tl.store(staging_ptrs, tl.load(cache_ptrs, mask=mask), mask=mask)
    else:
        tl.store(cache_ptrs, tl.load(staging_ptrs, mask=mask), mask=mask)


def copy_blocks(caches: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """caches[l][targets[i]] = caches[l][sources[i]] for every layer l, bit by bit

    caches: one [N, ...] per layer, of any dtype; blocks contiguous, of a multiple of 16 bytes, the same in all layers; sources
    and targets: [n] int64 or int32 on the device; no target is a source of another pair (copy on write: arXiv 2309.06180,
    section 4.4). Reads and writes n · layers blocks, 2 · n · layers · block bytes, and computes nothing. The last program of a
    block masks words beyond its end.
    """
    if sources.shape[0] == 0:
        return
    words, stride = _block_words(caches)
    grid = (sources.shape[0], len(caches), triton.cdiv(words, BLOCK))
    copy_blocks_kernel[grid](_addresses(caches), sources, targets, words, stride, BLOCK, num_warps=NUM_WARPS)


def gather_blocks(caches: Sequence[torch.Tensor], blocks: torch.Tensor, staging: torch.Tensor, rows: torch.Tensor) -> None:
    """staging[rows[i], l] = caches[l][blocks[i]]: staging: [R, layers, ...one block] on the device or page-locked

    blocks, rows: [n] int64 or int32 on the device; otherwise as `copy_blocks`. A staging buffer in device memory is then sent
    to the host in one copy; a page-locked one is written over the bus, and is complete when the stream has passed this launch.
    """
    _stage(caches, blocks, staging, rows, to_staging=True)


def scatter_blocks(caches: Sequence[torch.Tensor], blocks: torch.Tensor, staging: torch.Tensor, rows: torch.Tensor) -> None:
    """caches[l][blocks[i]] = staging[rows[i], l]: the inverse of `gather_blocks`; no block is named twice."""
    _stage(caches, blocks, staging, rows, to_staging=False)


def _stage(
    caches: Sequence[torch.Tensor], blocks: torch.Tensor, staging: torch.Tensor, rows: torch.Tensor, *, to_staging: bool
) -> None:
    if blocks.shape[0] == 0:
        return
    words, stride = _block_words(caches)
    assert staging.is_contiguous(), "the staging buffer must be contiguous"
    assert staging[0].nbytes == words * WORD_BYTES * len(caches), "a row of the staging buffer holds all layers of a block"
    grid = (blocks.shape[0], len(caches), triton.cdiv(words, BLOCK))
    stage_blocks_kernel[grid](
        _addresses(caches), blocks, staging.view(torch.int64), rows, words, stride, len(caches), BLOCK, to_staging,
        num_warps=NUM_WARPS,
    )  # fmt: skip


def _block_words(caches: Sequence[torch.Tensor]) -> tuple[int, int]:
    """→ words per block and stride between blocks in words. Raises AssertionError if the layers' layouts differ or do not
    fit."""
    first = caches[0]
    assert first[0].is_contiguous(), "a block must be contiguous"
    layouts = {(cache.shape, cache.stride(), cache.dtype) for cache in caches}
    assert len(layouts) == 1, "caches of one call must have the same layout"
    block_bytes, stride_bytes = first[0].nbytes, first.stride(0) * first.element_size()
    assert block_bytes % 16 == stride_bytes % 16 == 0, f"a block of {block_bytes} bytes is not a multiple of 16"
    return block_bytes // WORD_BYTES, stride_bytes // WORD_BYTES


def _addresses(caches: Sequence[torch.Tensor]) -> torch.Tensor:
    return _address_table(tuple(cache.data_ptr() for cache in caches), caches[0].device)


@functools.lru_cache(maxsize=64)
def _address_table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[layers] int64 on the device. The key is the table's content: an entry stays valid whatever is at these addresses."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)
