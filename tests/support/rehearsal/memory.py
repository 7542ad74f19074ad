"""Memory of an emulated card and page-locked host memory: both are CPU tensors that contain garbage until they are written.

Freed device memory is overwritten with garbage, in the stream of its allocation and after all work launched there, as if
torch's allocator reused it at once. So another stream that still uses it, or a graph captured with it, produces wrong results.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import numpy as np
import torch

from tests.support.rehearsal.card import Card, Stream, current_card

GARBAGE_INTEGER = 61
"""Garbage for integers: wrong as a value, but as an index it does not crash the process."""


class Memory:
    """A device allocation, alive as long as any tensor uses it. `is_inference`: it was made in inference mode."""

    def __init__(self, card: Card, data: torch.Tensor) -> None:
        num_bytes = card.allocate(data.nbytes)
        self.streams: list[Stream] = []  # of `record_stream`
        self.is_inference = torch.is_inference_mode_enabled()
        graph = card.capture if card.capture is not None and card.capture.captures(card.stream) else None
        weakref.finalize(self, _free, card, card.stream, graph, self.streams, data, num_bytes).atexit = False


def _free(card: Card, stream: Stream, graph: object, users: list[Stream], data: torch.Tensor, num_bytes: int) -> None:
    if card.closed:
        return
    card.allocated_bytes -= num_bytes
    if graph is not None:
        if card.capture is graph:
            card.capture.works.append(lambda: fill_with_garbage(data))  # type: ignore[union-attr]
        return  # a graph keeps its memory
    for user in users:
        position = user.launched
        stream.enqueue(lambda user=user, position=position: user.run_to(position))  # type: ignore[misc]
    stream.enqueue(lambda: fill_with_garbage(data))


def fill_with_garbage(data: torch.Tensor) -> None:
    """Fill with NaN, or with GARBAGE_INTEGER."""
    if data.dtype.itemsize == 1 and data.dtype.is_floating_point:
        data.view(torch.uint8).fill_(0x7F)  # NaN in e4m3 and e5m2
    elif data.dtype.is_floating_point or data.dtype.is_complex:
        data.fill_(float("nan"))
    else:
        data.fill_(GARBAGE_INTEGER)


def allocate_garbage(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The memory of a new tensor, filled with garbage. Raises torch.OutOfMemoryError."""
    current_card().check_memory(math.prod(size) * dtype.itemsize)
    data = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
    fill_with_garbage(data)
    return data


_page_locked_bytes: dict[int, int] = {}


def make_page_locked(like: torch.Tensor) -> torch.Tensor:
    """A page-locked host tensor with the values of `like`."""
    current_card().refuse_in_capture("to lock memory of the host")
    memory = np.empty(max(1, like.nbytes), dtype=np.uint8)
    address = memory.ctypes.data
    _page_locked_bytes[address] = memory.nbytes
    weakref.finalize(memory, _page_locked_bytes.pop, address, None).atexit = False
    flat = torch.from_numpy(memory)
    del memory
    found = flat[: like.nbytes].view(like.dtype) if like.numel() else torch.empty(0, dtype=like.dtype)
    found = found.view(like.shape)
    found.copy_(like)
    return found


def is_page_locked(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _page_locked_bytes
