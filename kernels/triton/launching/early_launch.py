"""Programmatic dependent launch: a kernel is launched before its predecessor has completed (from capability 90 on).

In a decode step of one request a kernel runs for 2 to 60 µs, with a gap of about one between two of them: results are written
back, the next programs are scheduled, compute their addresses and wait for their first bytes. A kernel that is launched early
starts when its predecessor's programs have ended, and itself waits until their stores are visible. Every kernel that is
launched early waits, so stream order is preserved: each kernel sees the results of all kernels before it.

Before its wait a kernel may load only what its direct predecessor does not write: weights; in the decode of a single request
(`lone_decode`) also the block table, the length, the angle and the slot, which are written when the step begins, and cached
tokens. Such a load is marked by its eviction policy: `evict_first` if the data is read once in a step, `evict_last` if every
layer reads it. The compile gate and the emulated card reject every other access before the wait; the latter also rejects loads
of data that the predecessor has actually stored.

Why that is safe: stores of earlier kernels are in memory, because the predecessor has waited for them. And no multiprocessor
has a stale copy in its cache: it invalidates that cache when it starts a program or when a program waits, depending on the
card. Tables and lengths were last read in the step before, and since then the output head has run on all multiprocessors.

A kernel of more than `EARLY_ROWS_MAX` rows is launched in the ordinary way.

No kernel triggers its successor any earlier. On an H200, programs that wait beside running ones cost more than they gain: 170
µs per layer of Llama-3.1-8B, 157 without early launches, 154 as done here (docs/log/gpu-kernels.md).

Kernels of torch and cuBLAS in between are launched in the ordinary way. With `GATEHOUSE_EARLY_LAUNCH=0` all kernels are.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.operations import FUSED_ROWS_MAX
from kernels.triton.launching.card_properties import capability, interpreted

VARIABLE = "GATEHOUSE_EARLY_LAUNCH"
CAPABILITY_MIN = 90
EARLY_ROWS_MAX = FUSED_ROWS_MAX
"""Measured at 1 row, where early launches are faster, and at 256, where they are not: a step of Llama-8B took 17.75 ms on an
H200, 17.30 with ordinary launches. The limit is where steps begin to consist of other kernels."""


def early_launch(device: torch.device, num_rows: int) -> dict[str, bool]:
    """Launch arguments for `num_rows` rows: the kernel's constant EARLY, and Triton's `launch_pdl`."""
    is_early = num_rows <= EARLY_ROWS_MAX and supports_early_launch(device)
    return {"EARLY": is_early, "launch_pdl": is_early}


@functools.cache
def supports_early_launch(device: torch.device) -> bool:
    """Whether the card supports early launches, and they are not switched off."""
    if device.type != "cuda" or interpreted() or os.environ.get(VARIABLE, "1") == "0":
        return False
    return capability(device) >= CAPABILITY_MIN


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Waits for the preceding kernel. Before it, no store is allowed, nor a load of what that kernel writes (see above)."""
    if EARLY:
        gdc_wait()
