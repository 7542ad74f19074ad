"""A kernel that is launched before the one in front of it has ended (programmatic dependent launch, from capability 90 on).

In a decode step of one request a kernel works for 2 to 60 µs, and about one more passes between two of them: results are
written back, the next programs are handed out, compute their addresses and wait for their first bytes. A kernel that is
launched early begins when the programs in front of it have ended, and waits by itself until what they wrote can be seen. Before
that it may ask for weights, which no kernel writes, and for nothing else. Whoever is launched early waits, so that an order in
which each kernel sees all before it remains: the one of a stream.

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

from kernels.triton.tuning import capability, interpreted

VARIABLE = "GATEHOUSE_EARLY_LAUNCH"
CAPABILITY_MIN = 90


@functools.cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """What a launch passes on: the kernel's constant EARLY, and whether the card may start it before its predecessor ended."""
    if device.type != "cuda" or interpreted() or os.environ.get(VARIABLE, "1") == "0":
        return {"EARLY": False, "launch_pdl": False}
    early = capability(device) >= CAPABILITY_MIN
    return {"EARLY": early, "launch_pdl": early}


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Only weights may be read before, and nothing written."""
    if EARLY:
        gdc_wait()
