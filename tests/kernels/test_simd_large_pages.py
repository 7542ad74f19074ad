"""Memory that asks for large pages: tensors like any others, whatever the system says."""

from __future__ import annotations

import pytest
import torch

from kernels.simd import large_pages
from kernels.simd.large_pages import on_large_pages


@pytest.mark.parametrize("shape", [(1,), (3, 5), (1025, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8])
def test_tensors_hold_what_is_written_to_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = on_large_pages(*shape, dtype=dtype)
    assert made.shape == shape
    assert made.dtype is dtype
    assert made.is_contiguous()
    assert torch.equal(made.fill_(7), torch.full(shape, 7, dtype=dtype))


def test_only_whole_pages_of_the_tensor_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[int, int]] = []
    monkeypatch.setattr(large_pages, "_madvise", lambda: lambda first, size, advice: advised.append((first, size)))
    made = on_large_pages(1 << 20)
    ((first, size),) = advised
    assert first % 4096 == 0
    assert size % 4096 == 0
    assert made.data_ptr() <= first < first + size <= made.data_ptr() + made.nbytes
    assert size > made.nbytes - 2 * 4096
    on_large_pages(10)
    assert len(advised) == 1


def test_a_system_without_such_advice_gives_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_madvise", lambda: None)
    assert on_large_pages(4, 4).zero_().sum() == 0
