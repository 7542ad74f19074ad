"""A kernel that is launched before the one in front of it has ended (programmatic dependent launch, from capability 90 on).

In a decode step of one request a kernel works for 2 to 60 µs, and about one more passes between two of them: results are
written back, the next programs are handed out, compute their addresses and wait for their first bytes. A kernel that is
launched early begins when the programs in front of it have ended, and waits by itself until what they wrote can be seen.
Whoever is launched early waits, so that an order in which each kernel sees all before it remains: the one of a stream.

Before its wait a kernel may read only what the kernel just in front of it does not write: weights; in the decode of a lone
request (`lone_decode`) also the block table, the length and the angle that its step begins with, and what its cache holds. Such
a read is marked by its eviction policy: first where the data is read once in a step, last where every layer reads it. The
compile gate and the emulated card refuse every other access before the wait, the card also one to what the kernel in front has
in fact stored.

Why that is safe: what kernels further in front wrote is in memory, since the one between has waited for them. And no
multiprocessor holds an older copy: each drops its own when it starts a program or when a program waits, whichever the card
does; tables and lengths were read last in the step before, and since then the output head has run on all multiprocessors.

A kernel of more than `EARLY_ROWS_MAX` rows is launched in turn.

No kernel lets the next one begin any sooner. On an H200 programs that wait beside those that work cost more than they gain:
170 µs a layer of Llama-3.1-8B, 157 in turn, 154 as here (docs/log/gpu-kernels.md).

Kernels of torch and cuBLAS in between are launched as always. `GATEHOUSE_EARLY_LAUNCH=0` launches all of them so.
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
"""Measured at 1 row, where early is the faster, and at 256, where it is not: a step of Llama-8B took 17.75 ms on an H200, 17.30
in turn. In between it is where a step begins to consist of other kernels."""


def early_launch(device: torch.device, num_rows: int) -> dict[str, bool]:
    """What a launch for so many rows passes on: the kernel's constant EARLY, and whether the card may start it early."""
    early = num_rows <= EARLY_ROWS_MAX and may_be_early(device)
    return {"EARLY": early, "launch_pdl": early}


@functools.cache
def may_be_early(device: torch.device) -> bool:
    """Whether the card can, and nobody has switched it off."""
    if device.type != "cuda" or interpreted() or os.environ.get(VARIABLE, "1") == "0":
        return False
    return capability(device) >= CAPABILITY_MIN


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Before it nothing may be written, and only what the kernel in front does not write may be read (see above)."""
    if EARLY:
        gdc_wait()
