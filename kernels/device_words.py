"""Many small device tensors that the host writes occasionally, all with one copy and one operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from kernels.transfer import send

WORD_BYTES = 4
ALIGNED_WORDS = 4
"""Kernels take pointers at multiples of 16 bytes."""

Shape = tuple[int, ...]
Pieces = Mapping[str, tuple[torch.dtype, Shape]]
"""The dtype, of 4 or 8 bytes, and the shape of each tensor, by name."""
Words = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
"""The arguments of `DeviceWords.write`: indices of words, [n] int64, and their values, [n] int32."""
NO_WORDS: Words = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)


class DeviceWords:
    """Words of 32 bits on `device`, at fixed addresses and initially zero, divided into named tensors.

    A write costs the host two launches, however many words it writes to however many of the tensors: on an H200 each launch
    takes some 60 µs while the device computes. On a CPU the words are written in place.
    """

    def __init__(
        self,
        pieces: Pieces,
        device: torch.device,
        *,
        send_numbers: Callable[[np.ndarray[Any, Any]], torch.Tensor] | None = None,
    ) -> None:
        """`send_numbers`: brings [n] int64 to the device; the default is `transfer.send`."""
        self._pieces = pieces
        self._offsets: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in pieces.items():
            self._offsets[name] = end
            end += -(-_num_words(dtype, shape) // ALIGNED_WORDS) * ALIGNED_WORDS
        self._words = torch.zeros(end, dtype=torch.int32, device=device)
        self._send = send_numbers or partial(send, dtype=torch.int64, device=device)
        self.on_host: np.ndarray[Any, Any] | None = None
        """The same words, if the device is the host."""
        if device.type == "cpu":
            self.on_host = self._words.numpy()

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of this name, in its shape."""
        (dtype, shape), first = self._pieces[name], self._offsets[name]
        return self._words[first : first + _num_words(dtype, shape)].view(dtype).view(shape)

    def first(self, name: str) -> int:
        """The index of the first word of a tensor."""
        return self._offsets[name]

    def places(self, name: str) -> np.ndarray[Any, Any]:
        """The indices of the words of each element of a tensor: its shape and 1 or, for elements of 8 bytes, 2"""
        (dtype, shape), first = self._pieces[name], self._offsets[name]
        return np.arange(first, first + _num_words(dtype, shape)).reshape(*shape, dtype.itemsize // WORD_BYTES)

    def write(self, places: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        """Write words. places: [n] int64, indices of words, all different; values: [n] int32"""
        if self.on_host is not None:
            self.on_host[places] = values
            return
        count = len(places)
        if not count:
            return
        packed = np.empty(count + (count + 1) // 2, dtype=np.int64)
        packed[:count] = places
        packed[count:].view(np.int32)[:count] = values
        sent = self._send(packed)
        self.write_sent(sent[:count], sent[count:].view(torch.int32)[:count])

    def write_sent(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """As `write`, for arguments on the device. Can be captured in a graph."""
        self._words.index_copy_(0, places, values)


def _num_words(dtype: torch.dtype, shape: Shape) -> int:
    return prod(shape) * dtype.itemsize // WORD_BYTES
