"""A kernel that is launched before the one before it has ended (programmatic dependent launch, from capability 90 on).

In a decode step of one request a kernel works for 2 to 60 µs, and about one more passes between two of them: results are
written back, the next programs are scheduled, compute their addresses and wait for their first bytes. A kernel that is launched
early begins when the programs of the one before have ended, and itself waits until what they wrote is visible. Every kernel
that is launched early waits, so the order of a stream is kept: each kernel sees the results of all kernels before it.

Before its wait a kernel may read only what the kernel directly before it does not write: weights; in the decode of a lone
request (`lone_decode`) also the block table, the length and the angle with which its step begins, and the cache's content. Such
a read is marked by its eviction policy: first if the data is read once in a step, last if every layer reads it. The compile
gate and the emulated card refuse every other access before the wait; the card also refuses reads of data that the kernel before
has in fact stored.

Why that is safe: what earlier kernels wrote is in memory, because the one in between has waited for them. And no multiprocessor
holds an older copy: each drops its own when it starts a program or when a program waits, depending on the card. Tables and
lengths were last read in the step before, and since then the output head has run on all multiprocessors.

A kernel of more than `EARLY_ROWS_MAX` rows is launched in turn.

No kernel lets the next one begin even sooner. On an H200 programs that wait beside working ones cost more than they gain: 170
µs a layer of Llama-3.1-8B, 157 without early launches, 154 as done here (docs/log/gpu-kernels.md).

Kernels of torch and cuBLAS in between are launched as always. With `GATEHOUSE_EARLY_LAUNCH=0` all kernels are.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from kernels.operations import FUSED_ROWS_MAX
from kernels.triton.tuning import capability, interpreted

VARIABLE = "GATEHOUSE_EARLY_LAUNCH"
CAPABILITY_MIN = 90
EARLY_ROWS_MAX = FUSED_ROWS_MAX
"""Measured at 1 row, where early launches are faster, and at 256, where they are not: a step of Llama-8B took 17.75 ms on an
H200, 17.30 in turn. The limit is where steps begin to consist of other kernels."""


def early_launch(device: torch.device, num_rows: int) -> dict[str, bool]:
    """Launch arguments for `num_rows` rows: the kernel's constant EARLY, and whether the card may start it early."""
    early = num_rows <= EARLY_ROWS_MAX and may_be_early(device)
    return {"EARLY": early, "launch_pdl": early}


@functools.cache
def may_be_early(device: torch.device) -> bool:
    """Whether the card supports it, and it is not switched off."""
    if device.type != "cuda" or interpreted() or os.environ.get(VARIABLE, "1") == "0":
        return False
    return capability(device) >= CAPABILITY_MIN


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Before it nothing may be written, and only what the kernel in front does not write may be read (see above)."""
    if EARLY:
        gdc_wait()
