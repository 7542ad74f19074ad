"""Memory that refuses what a card would fault on or answer with chance (PTX ISA 5.1, state spaces; 8, memory consistency).

Global memory is that of tensors of the CPU at their own addresses, tables of addresses among them hold what is meant; nothing
outside of what a launch may reach is touched. Shared memory begins as poison, and remembers for each of its granules which warp
wrote and read it last: an access that no barrier orders behind another warp's is a fault, in whatever order the warps ran here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch

from tests.support.ptx.types import POISON, RAW, Array

GRANULE = 2  # bytes of shared memory that have one owner: nothing narrower is written there by two warps
_WARPS_MAX = 64  # of a block, one more than there can be: the last number stands for several
_SEVERAL = _WARPS_MAX - 1


class Fault(Exception):
    """What a card would refuse, or what its result would depend on by chance."""


class GlobalMemory:
    """The storages of `tensors`, each up to its own end."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        spans = sorted((begin, begin + size) for begin, size in storages.items() if size)
        self._begins = np.array([begin for begin, _ in spans], np.int64)
        self._ends = np.array([end for _, end in spans], np.int64)
        if spans:  # one array over everything in between, of which only the spans are touched
            self._origin = spans[0][0] & ~255
            size = int(self._ends.max()) - self._origin
            self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * (size + -size % 8)).from_address(self._origin))

    def check(self, addresses: Array, size: int, alignment: int) -> None:
        """addresses: [n] int64. Raises Fault unless each begins `size` bytes of one storage."""
        if addresses.size == 0:
            return
        if (addresses % alignment).any():
            raise Fault(f"misaligned: {hex(int(addresses[(addresses % alignment) != 0][0]))} for {alignment} bytes")
        span = np.searchsorted(self._begins, addresses, side="right") - 1
        inside = (span >= 0) & (addresses + size <= self._ends[span]) if self._ends.size else np.zeros(addresses.size, bool)
        if not inside.all():
            raise Fault(f"out of bounds: {self._nearest(int(addresses[~inside][0]), size)}")

    def _nearest(self, address: int, size: int) -> str:
        if not self._ends.size:
            return f"{size} bytes at {hex(address)}, where the launch has no memory"
        ahead, behind = self._begins - address, address + size - self._ends
        span = int(np.argmin(np.maximum(ahead, behind)))
        if ahead[span] > 0:
            return f"{size} bytes that begin {ahead[span]} before a tensor"
        return f"{size} bytes that end {behind[span]} behind a tensor of {self._ends[span] - self._begins[span]}"

    def load(self, addresses: Array, width: int, count: int) -> Array:
        """[n] addresses → [n, count] raw numbers of `width` bytes each."""
        self.check(addresses, width * count, width * count)
        if addresses.size == 0:
            return np.zeros((0, count), RAW[width])
        first = (addresses - self._origin) // width
        found: Array = self._words(width)[first[:, None] + np.arange(count)]
        return found

    def store(self, addresses: Array, values: Array) -> None:
        """values: [n, count], raw."""
        width, count = values.dtype.itemsize, values.shape[1]
        self.check(addresses, width * count, width * count)
        if addresses.size:
            self._words(width)[((addresses - self._origin) // width)[:, None] + np.arange(count)] = values

    def _words(self, width: int) -> Array:
        return self._bytes[: self._bytes.size // width * width].view(RAW[width])


class SharedMemory:
    """Of one block, so many bytes as its launch asks for. `warps` below: [n], the warp that each address belongs to."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.bytes = np.full(size + -size % 16, POISON, np.uint8)
        granules = self.bytes.size // GRANULE
        self._barriers = 1
        self._writers = np.zeros(granules, np.int32)  # barriers · 64 + warp
        self._readers = np.zeros(granules, np.int32)
        self._arriving = np.zeros(granules, np.uint8)  # copies under way to here
        self._multiplied = np.zeros(granules, np.uint8)  # products under way that read this
        self._unfenced = np.zeros(granules, bool)  # written since the last fence between the proxies

    def pass_barrier(self) -> None:
        """Every warp sees now what every other did."""
        self._barriers += 1

    def load(self, addresses: Array, width: int, count: int, warps: Array) -> Array:
        """[n] addresses → [n, count] raw numbers of `width` bytes each."""
        granules = self._granules(addresses, width * count, width * count)
        self._note_reads(granules, warps)
        found: Array = self.bytes.view(RAW[width])[(addresses // width)[:, None] + np.arange(count)]
        return found

    def store(self, addresses: Array, values: Array, warps: Array) -> None:
        """values: [n, count], raw. Several may store the same at one place."""
        width, count = values.dtype.itemsize, values.shape[1]
        granules = self._granules(addresses, width * count, width * count)
        places = (addresses // width)[:, None] + np.arange(count)
        words = self.bytes.view(RAW[width])
        changed = (words[places] != values).any(1)
        self._note_writes(granules, warps, changed)
        self._unfenced[granules] = True
        words[places] = values
        if (words[places] != values).any():
            raise Fault("two threads store different values at one place")

    def begin_copy(self, addresses: Array, size: int, warps: Array) -> Array:
        """A copy of `size` bytes to each of `addresses` may arrive from now on. Returns its granules for `end_copy`."""
        granules = self._granules(addresses, size, size)
        self._note_writes(granules, warps, np.ones(addresses.size, bool))
        self._arriving[granules] += 1
        return granules

    def end_copy(self, addresses: Array, granules: Array, values: Array, warps: Array) -> None:
        """values: [n, size] bytes."""
        self._arriving[granules] -= 1
        self.bytes[addresses[:, None] + np.arange(values.shape[1])] = values
        self._writers[granules] = self._owners(warps)

    def begin_product(self, addresses: Array, width: int, warps: Array) -> tuple[Array, Array]:
        """A product of `warps` reads elements of `width` bytes from now on: their raw values, granules for `end_product`."""
        granules = self._granules(addresses, width, width)
        if self._unfenced[granules].any():
            raise Fault("wgmma reads what was stored behind the last fence.proxy.async")
        for warp in warps:
            self._note_reads(granules, np.full(addresses.size, warp))
        self._multiplied[granules] += 1  # by one for each granule, however often it is named
        return self.bytes.view(RAW[width])[addresses // width], granules

    def end_product(self, granules: Array) -> None:
        self._multiplied[granules] -= 1

    def fence_proxies(self) -> None:
        """What was stored may be read by wgmma."""
        self._unfenced[:] = False

    def _granules(self, addresses: Array, size: int, alignment: int) -> Array:
        """[n] addresses → [n, granules] of `size` bytes each. Raises Fault as `GlobalMemory.check` does."""
        if (addresses % alignment).any():
            raise Fault(f"misaligned in shared memory for {alignment} bytes")
        if addresses.size and (addresses.min() < 0 or addresses.max() + size > self._size):
            raise Fault(f"out of bounds of shared memory, which has {self._size} bytes")
        granules: Array = (addresses // GRANULE)[:, None] + np.arange(max(1, size // GRANULE))
        return granules

    def _owners(self, warps: Array) -> Array:
        return (self._barriers * _WARPS_MAX + warps).astype(np.int32)[:, None]

    def _note_reads(self, granules: Array, warps: Array) -> None:
        if self._arriving[granules].any():
            raise Fault("reads what a copy is still under way to")
        owners, since = self._owners(warps), self._barriers * _WARPS_MAX
        writers = self._writers[granules]
        if ((writers >= since) & (writers != owners)).any():
            raise Fault("reads what another warp wrote, without a barrier in between")
        readers = self._readers[granules]
        several = since + _SEVERAL
        noted = np.where((readers >= since) & (readers != owners), several, owners)
        self._readers[granules] = noted
        lost = self._readers[granules] != noted
        if lost.any():  # of several warps in this very instruction, one was noted
            self._readers[granules[lost]] = several

    def _note_writes(self, granules: Array, warps: Array, changed: Array) -> None:
        """changed: [n], what is stored differs from what is there."""
        if self._arriving[granules].any():
            raise Fault("writes where a copy is still under way to")
        if self._multiplied[granules].any():
            raise Fault("writes what wgmma is still reading")
        owners, since = self._owners(warps), self._barriers * _WARPS_MAX
        for earlier, did in ((self._readers[granules], "reads"), (self._writers[granules], "wrote")):
            if ((earlier >= since) & (earlier != owners) & changed[:, None]).any():
                raise Fault(f"writes what another warp {did}, without a barrier in between")
        self._writers[granules] = owners
