"""Memory with large pages behaves as any other, whatever the system answers."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.simd import large_pages
from kernels.simd.large_pages import LINE_BYTES, PAGE_BYTES, PIECE_BYTES, Pieces, on_large_pages


@pytest.mark.parametrize("shape", [(1,), (3, 5), (0, 4), (1025, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.uint8])
def test_tensors_hold_what_is_written_to_them(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = on_large_pages(*shape, dtype=dtype)
    assert made.shape == shape
    assert made.dtype is dtype
    assert made.is_contiguous()
    assert torch.equal(made.fill_(7), torch.full(shape, 7, dtype=dtype))


def test_tensors_lie_one_behind_another_and_never_on_each_other() -> None:
    pieces = Pieces()
    sizes = [10, 5 << 20, 64, 1, PIECE_BYTES // 2, 30 << 20, PIECE_BYTES // 2 + 1, 3 * PIECE_BYTES, 100]
    made = [pieces.take(size) for size in sizes]
    places = sorted((each.data_ptr(), each.data_ptr() + each.numel()) for each in made)
    assert [each.numel() for each in made] == sizes
    assert all(each.data_ptr() % LINE_BYTES == 0 for each in made)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    assert made[1].data_ptr() == made[0].data_ptr() + LINE_BYTES
    assert made[2].data_ptr() == made[1].data_ptr() + (5 << 20), "a piece is filled before the next is begun"
    assert made[8].data_ptr() == made[5].data_ptr() + (30 << 20), "one that has a piece of its own leaves the others alone"
    for index, each in enumerate(made):
        each.fill_(index)
    assert [int(each[-1]) for each in made] == list(range(len(made)))


def test_a_piece_outlives_whoever_made_it_and_begins_with_a_page() -> None:
    pieces = Pieces()
    first = pieces.take(PAGE_BYTES)
    assert first.data_ptr() % PAGE_BYTES == 0
    first.fill_(5)
    del pieces
    assert int(first.sum()) == 5 * PAGE_BYTES


def _made_on_a_cpu(*shape: int) -> torch.Tensor:
    return ops.lasting_zeros(*shape, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("make", [lambda *shape: on_large_pages(*shape).zero_(), _made_on_a_cpu], ids=["weights", "kv cache"])
def test_tensors_are_on_large_pages_as_soon_as_they_are_written(make: Callable[..., torch.Tensor]) -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        assert make(4).sum() == 0  # nobody has such pages to give
        return
    before = _on_large_pages_kib()
    kept = [make(700, 1000) for _ in range(40)]  # 2.7 MB each
    assert not any(each.any() for each in kept)
    assert _on_large_pages_kib() - before >= 0.75 * sum(each.nbytes for each in kept) / 1024


def _on_large_pages_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


def test_a_system_without_such_advice_gives_plain_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_ADVICE", None)
    assert Pieces().take(100).fill_(1).sum() == 100


def test_a_refusal_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_ADVICE", 4095)  # no advice that any system knows
    with pytest.raises(OSError, match="Invalid argument"):
        mmap.mmap(-1, 4096).madvise(4095)
    assert Pieces().take(100).fill_(1).sum() == 100
