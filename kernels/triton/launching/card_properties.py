"""Properties of the card for launchers: its compute capability and the limits that follow from it. Chooses no tile sizes.

Configurations are chosen by plain functions of shape and capability, not by trial, so that tests, the compile gate and serving
use the same kernels. Only between the few alternatives of `kernels.alternatives` does an engine choose by timing them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from triton import knobs

LOG2_E = 1.4426950408889634
HOPPER = 90  # an H200's
# Launchers choose configurations for this card in the interpreter.
INTERPRETED_CAPABILITY = 90
# Fewer than any card has: kernels that loop over their work with a fixed grid remain cheap to interpret.
INTERPRETED_MULTIPROCESSORS = 4


@dataclass(frozen=True, slots=True)
class Card:
    """Limits of one compute capability (CUDA C++ Programming Guide, table of technical specifications)."""

    shared_bytes_max: int  # per program
    shared_bytes_multiprocessor: int
    warps_multiprocessor: int
    has_fp8: bool  # whether it has instructions to convert and multiply e4m3

    @property
    def is_small(self) -> bool:
        """Whether it has only 100 KiB of shared memory, which hold fewer loads in flight."""
        return self.shared_bytes_multiprocessor < 128 * _KIB

    def programs(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """How many programs one multiprocessor holds at a time. Registers are allocated in units of 256 per warp."""
        by_registers = REGISTERS_MULTIPROCESSOR // (max(1, -(-registers * 32 // 256)) * 256 * num_warps)
        by_shared = self.shared_bytes_multiprocessor // (shared_bytes + SHARED_BYTES_RESERVED)
        return min(by_registers, by_shared, self.warps_multiprocessor // num_warps, PROGRAMS_MAX)


REGISTERS_MULTIPROCESSOR = 65536
SHARED_BYTES_RESERVED = 1024  # by the system, per program
PROGRAMS_MAX = 32
TENSOR_MEMORY_COLUMNS = 512  # per multiprocessor, from capability 100 on
_KIB = 1024

CARDS: dict[int, Card] = {
    80: Card(163 * _KIB, 164 * _KIB, 64, has_fp8=False),
    86: Card(99 * _KIB, 100 * _KIB, 48, has_fp8=False),
    89: Card(99 * _KIB, 100 * _KIB, 48, has_fp8=True),
    90: Card(227 * _KIB, 228 * _KIB, 64, has_fp8=True),
    100: Card(227 * _KIB, 228 * _KIB, 64, has_fp8=True),
    120: Card(99 * _KIB, 100 * _KIB, 48, has_fp8=True),
}


def card(capability: int) -> Card:
    """The newest known card that is not newer than `capability`. Raises ValueError below 80."""
    known = [number for number in CARDS if number <= capability]
    if not known:
        raise ValueError(f"compute capability {capability // 10}.{capability % 10} is older than 8.0, the oldest supported")
    return CARDS[max(known)]


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the CPU."""
    return bool(knobs.runtime.interpret)


@functools.cache
def capability(device: torch.device) -> int:
    """10 · major + minor of the newest known card that is not newer than this one: 100 for 10.3, 120 for 12.1, which has no
    more shared memory. 90 in the interpreter. Cards older than all known ones keep their own number."""
    if device.type != "cuda":
        return INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    number = major * 10 + minor
    return max((known for known in CARDS if known <= number), default=number)


def has_gluon(device: torch.device) -> bool:
    """Whether the Gluon kernels are used. That part of Triton is experimental: it is imported only on Hopper, and the
    interpreter cannot run it."""
    return capability(device) == HOPPER and not interpreted()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The least number of programs that run at a time: 132 on an H200, 4 in the interpreter."""
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size` and at least 1: what `tl.arange` takes."""
    return 1 << max(0, size - 1).bit_length()
