"""Memory that detects faults and undefined results of a card (PTX ISA 5.1, state spaces; 8, memory consistency).

Global memory is that of CPU tensors at their own addresses, so tables of addresses work; nothing outside the tensors of a
launch is accessed. Shared memory starts as poison and records the last writer and reader of each granule: an access that no
barrier orders after a conflicting one is a fault, whatever the order of execution here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch

from tests.support.ptx.types import POISON, RAW, Array

WARPS_MAX = 32  # of a block
WORD = 4  # bytes of global memory: granularity of recorded stores
NO_STORES = np.zeros(0, np.int64)
GRANULE = 1  # bytes of shared memory with one owner: threads of several warps write single e4m3 values
_WHO_BITS = 11  # of an owner id: a thread below 1024, or one of these
_OF_WARP = 1024  # + warp: several threads of the warp, individually
_AS_WARP = 1056  # + warp: the warp as a whole
_SEVERAL = _WHO = 2**_WHO_BITS - 1  # several warps; also the mask of an owner id


class Fault(Exception):
    """An access that a card would reject, or whose result would be undefined."""


class GlobalMemory:
    """The storages of `tensors`, each with its own bounds. `unsynchronised`: words stored by the previous launch, which must
    not be read before waiting for it; None if neither this nor the stores of this launch are tracked."""

    def __init__(self, tensors: Iterable[torch.Tensor], unsynchronised: Array | None = None) -> None:
        self._unsynchronised = unsynchronised
        self._stored: list[Array] = []
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        spans = sorted((begin, begin + size) for begin, size in storages.items() if size)
        self._begins = np.array([begin for begin, _ in spans], np.int64)
        self._ends = np.array([end for _, end in spans], np.int64)
        if spans:  # one array over the whole range, of which only the spans are accessed
            self._origin = spans[0][0] & ~255
            size = int(self._ends.max()) - self._origin
            self._bytes = np.ctypeslib.as_array((ctypes.c_uint8 * (size + -size % 8)).from_address(self._origin))

    def check(self, addresses: Array, size: int, alignment: int) -> None:
        """addresses: [n] int64. Raises Fault unless `size` bytes from each lie within one storage."""
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

    @property
    def stored(self) -> Array:
        """The words stored so far, unique and sorted."""
        return np.unique(np.concatenate(self._stored)) if self._stored else NO_STORES

    def check_visible(self, addresses: Array, size: int) -> None:
        """Raises Fault if any of `size` bytes at each address was stored by the previous launch."""
        if self._unsynchronised is not None and np.isin(_words_of(addresses, size), self._unsynchronised).any():
            raise Fault("what the kernel in front has stored is read before griddepcontrol.wait")

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
            if self._unsynchronised is not None:
                self._stored.append(_words_of(addresses, width * count))
            self._words(width)[((addresses - self._origin) // width)[:, None] + np.arange(count)] = values

    def _words(self, width: int) -> Array:
        return self._bytes[: self._bytes.size // width * width].view(RAW[width])


def _words_of(addresses: Array, size: int) -> Array:
    """Indices of the words that contain `size` bytes at each (aligned) address."""
    found: Array = (addresses[:, None] + np.arange(0, size, WORD)).ravel() // WORD
    return found


class SharedMemory:
    """Shared memory of one block. `threads` below: [n], the thread of each address. An owner encodes who accessed a granule,
    and when, as a count of barriers."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.bytes = np.full(size + -size % 16, POISON, np.uint8)
        granules = self.bytes.size // GRANULE
        self._epoch = 1
        self._last_block_barrier = 1
        self._last_warp_barriers = np.ones(WARPS_MAX, np.int64)
        self._writers = np.zeros(granules, np.int64)
        self._readers = np.zeros(granules, np.int64)
        self._arriving = np.zeros(granules, np.uint8)  # pending copies to this granule
        self._multiplied = np.zeros(granules, np.uint8)  # pending products that read this granule
        self._unfenced = np.zeros(granules, bool)  # written since the last fence between the proxies

    def pass_barrier(self) -> None:
        """A block barrier: all earlier accesses are ordered before later ones."""
        self._epoch += 1
        self._last_block_barrier = self._epoch
        self._last_warp_barriers[:] = self._epoch

    def pass_warp_barrier(self, warps: Array) -> None:
        """A barrier within each of these warps."""
        self._epoch += 1
        self._last_warp_barriers[warps] = self._epoch

    def load(self, addresses: Array, width: int, count: int, threads: Array) -> Array:
        """[n] addresses → [n, count] raw numbers of `width` bytes each."""
        granules = self._granules(addresses, width * count, width * count)
        self._check_reads(granules, threads)
        self._note_reads(granules, threads)
        found: Array = self.bytes.view(RAW[width])[(addresses // width)[:, None] + np.arange(count)]
        return found

    def store(self, addresses: Array, values: Array, threads: Array) -> None:
        """values: [n, count], raw. Several threads may store the same value at one address."""
        width, count = values.dtype.itemsize, values.shape[1]
        granules = self._granules(addresses, width * count, width * count)
        places = (addresses // width)[:, None] + np.arange(count)
        words = self.bytes.view(RAW[width])
        changed = (words[places] != values).any(1)
        self._note_writes(granules, threads, changed)
        self._unfenced[granules] = True
        words[places] = values
        if (words[places] != values).any():
            raise Fault("two threads store different values at one place")

    def begin_copy(self, addresses: Array, size: int, threads: Array) -> Array:
        """Begin a copy of `size` bytes to each of `addresses`. → its granules, for `end_copy`"""
        granules = self._granules(addresses, size, size)
        self._note_writes(granules, threads, np.ones(addresses.size, bool))
        self._arriving[granules] += 1
        return granules

    def end_copy(self, addresses: Array, granules: Array, values: Array, threads: Array) -> None:
        """values: [n, size] bytes."""
        self._arriving[granules] -= 1
        self.bytes[addresses[:, None] + np.arange(values.shape[1])] = values
        self._writers[granules] = self._owners(threads)

    def begin_product(self, addresses: Array, width: int, warps: Array) -> tuple[Array, Array]:
        """Begin a product of `warps` that reads elements of `width` bytes. → their raw values; granules for `end_product`"""
        granules = self._granules(addresses, width, width)
        if self._unfenced[granules].any():
            raise Fault("wgmma reads what was stored behind the last fence.proxy.async")
        for warp in warps:
            self._check_reads(granules, np.full(addresses.size, warp * 32))
        if len(warps) == 1:
            self._note_reads(granules, np.full(addresses.size, warps[0] * 32), _AS_WARP + warps[0])
        else:
            self._readers[granules] = (self._epoch << _WHO_BITS) + _SEVERAL
        self._multiplied[granules] += 1  # by one per granule, even if it occurs repeatedly
        return self.bytes.view(RAW[width])[addresses // width], granules

    def end_product(self, granules: Array) -> None:
        self._multiplied[granules] -= 1

    def fence_proxies(self) -> None:
        """Make earlier stores readable by wgmma."""
        self._unfenced[:] = False

    def _granules(self, addresses: Array, size: int, alignment: int) -> Array:
        """[n] addresses → [n, granules] of `size` bytes each. Raises Fault as `GlobalMemory.check` does."""
        if (addresses % alignment).any():
            raise Fault(f"misaligned in shared memory for {alignment} bytes")
        if addresses.size and (addresses.min() < 0 or addresses.max() + size > self._size):
            raise Fault(f"out of bounds of shared memory, which has {self._size} bytes")
        granules: Array = (addresses // GRANULE)[:, None] + np.arange(max(1, size // GRANULE))
        return granules

    def _owners(self, threads: Array) -> Array:
        owners: Array = (self._epoch << _WHO_BITS) + threads.astype(np.int64)[:, None]
        return owners

    def _races(self, earlier: Array, threads: Array) -> tuple[Array, Array]:
        """[n, granules]: accesses not ordered before those of `threads`, and accesses by the same warp."""
        owner_ids, warps = earlier & _WHO, (threads // 32)[:, None]
        in_warp = _warp_of(owner_ids) == warps
        met = np.where(in_warp, self._last_warp_barriers[warps], self._last_block_barrier)
        is_own = (owner_ids == threads[:, None]) | (in_warp & (owner_ids >= _AS_WARP))
        return ~is_own & (earlier >> _WHO_BITS >= met), in_warp

    def _is_ordered(self, earlier: Array) -> bool:
        """Whether a block barrier orders all these accesses before later ones: a fast sufficient check."""
        return earlier.size == 0 or bool(earlier.max() < self._last_block_barrier << _WHO_BITS)

    def _refuse_race(self, earlier: Array, threads: Array, what: str) -> None:
        if self._is_ordered(earlier):
            return
        racing, in_warp = self._races(earlier, threads)
        if racing.any():
            other = "another thread of its warp" if in_warp[racing].all() else "another warp"
            raise Fault(what.format(other=other) + ", without a barrier in between")

    def _check_reads(self, granules: Array, threads: Array) -> None:
        if self._arriving[granules].any():
            raise Fault("reads what a copy is still under way to")
        self._refuse_race(self._writers[granules], threads, "reads what {other} wrote")

    def _note_reads(self, granules: Array, threads: Array, as_warp: int | None = None) -> None:
        """as_warp: the owner if a warp reads as a whole."""
        time, of_warp = self._epoch << _WHO_BITS, _OF_WARP + (threads // 32)[:, None]
        noted = self._owners(threads) if as_warp is None else time + as_warp
        readers = self._readers[granules]
        if not self._is_ordered(readers):  # concurrent reads do not race: record several readers
            racing, in_warp = self._races(readers, threads)
            noted = np.where(racing, time + np.where(in_warp, of_warp, _SEVERAL), noted)
        self._readers[granules] = noted
        noted_owners = self._readers[granules]
        lost = noted_owners != noted
        if lost.any():  # several threads of this instruction read a granule, and only one was recorded
            in_warp = _warp_of(noted_owners & _WHO) == of_warp - _OF_WARP
            self._readers[granules[lost & in_warp]] = (time + np.broadcast_to(of_warp, noted_owners.shape))[lost & in_warp]
            self._readers[granules[lost & ~in_warp]] = time + _SEVERAL

    def _note_writes(self, granules: Array, threads: Array, changed: Array) -> None:
        """changed: [n], whether the stored value differs from the present one."""
        if self._arriving[granules].any():
            raise Fault("writes where a copy is still under way to")
        if self._multiplied[granules].any():
            raise Fault("writes what wgmma is still reading")
        for owners, action in ((self._readers, "reads"), (self._writers, "wrote")):
            if not self._is_ordered(owners[granules]):
                self._refuse_race(owners[granules[changed]], threads[changed], f"writes what {{other}} {action}")
        self._writers[granules] = self._owners(threads)


def _warp_of(owner_ids: Array) -> Array:
    """The warp of an owner; _SEVERAL for several warps."""
    return np.where(owner_ids < _OF_WARP, owner_ids // 32, np.where(owner_ids < _SEVERAL, owner_ids % 32, _SEVERAL))
