"""Memory on large pages: tensors like any others, whatever the system answers to the request."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.simd import large_pages
from kernels.simd.large_pages import CHUNK_BYTES, LINE_BYTES, PAGE_BYTES, BumpAllocator, on_large_pages


@pytest.mark.parametrize("shape", [(1,), (3, 5), (0, 4), (1025, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8])
def test_tensors_hold_what_is_written_to_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = on_large_pages(*shape, dtype=dtype)
    assert tensor.shape == shape
    assert tensor.dtype is dtype
    assert tensor.is_contiguous()
    assert torch.equal(tensor.fill_(7), torch.full(shape, 7, dtype=dtype))


def test_tensors_are_allocated_one_after_another_and_never_overlap() -> None:
    allocator = BumpAllocator()
    sizes = [10, 5 << 20, 64, 1, CHUNK_BYTES // 2, 30 << 20, CHUNK_BYTES // 2 + 1, 3 * CHUNK_BYTES, 100]
    tensors = [allocator.allocate(size) for size in sizes]
    ranges = sorted((each.data_ptr(), each.data_ptr() + each.numel()) for each in tensors)
    assert [each.numel() for each in tensors] == sizes
    assert all(each.data_ptr() % LINE_BYTES == 0 for each in tensors)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert tensors[1].data_ptr() == tensors[0].data_ptr() + LINE_BYTES
    assert tensors[2].data_ptr() == tensors[1].data_ptr() + (5 << 20), "a chunk is filled before the next one is begun"
    assert tensors[8].data_ptr() == tensors[5].data_ptr() + (30 << 20), (
        "a tensor with a chunk of its own does not affect the others"
    )
    for index, each in enumerate(tensors):
        each.fill_(index)
    assert [int(each[-1]) for each in tensors] == list(range(len(tensors)))


def test_a_chunk_outlives_its_allocator_and_begins_on_a_page() -> None:
    allocator = BumpAllocator()
    first = allocator.allocate(PAGE_BYTES)
    assert first.data_ptr() % PAGE_BYTES == 0
    first.fill_(5)
    del allocator
    assert int(first.sum()) == 5 * PAGE_BYTES


def _made_on_a_cpu(*shape: int) -> torch.Tensor:
    return ops.lasting_zeros(*shape, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("make", [lambda *shape: on_large_pages(*shape).zero_(), _made_on_a_cpu], ids=["weights", "kv cache"])
def test_tensors_are_on_large_pages_as_soon_as_they_are_written(make: Callable[..., torch.Tensor]) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        assert make(4).sum() == 0  # the system has no such pages
        return
    before = _on_large_pages_kib()
    tensors = [make(700, 1000) for _ in range(40)]  # 2.7 MB each
    assert not any(each.any() for each in tensors)
    assert _on_large_pages_kib() - before >= 0.75 * sum(each.nbytes for each in tensors) / 1024


def _on_large_pages_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def test_a_system_without_madv_hugepage_gives_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_MADV_HUGEPAGE", None)
    assert BumpAllocator().allocate(100).fill_(1).sum() == 100


def test_a_refused_madvise_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_MADV_HUGEPAGE", 4095)  # advice that no system supports
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, 4096).madvise(4095)
    assert BumpAllocator().allocate(100).fill_(1).sum() == 100
