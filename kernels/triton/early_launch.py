"""A kernel that starts while the one before it ends (programmatic dependent launch, from compute capability 90 on).

In a decode step of one request a kernel works for 1 to 30 µs, and about one more passes between two of them: the last programs
end, the next ones are handed out, compute their addresses and wait for their first bytes. A kernel here lets the next one
start as soon as all of its own programs have. That one asks for weights, which no kernel writes, and waits until the kernel
before it has ended and its results can be seen. Nothing else happens before the wait, and whoever is launched early waits, so
that an order in which each kernel sees all before it remains: the one of a stream.

Kernels of torch and cuBLAS in between are launched as always. `GATEHOUSE_EARLY_LAUNCH=0` launches all of them so.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton.tuning import capability, interpreted

VARIABLE = "GATEHOUSE_EARLY_LAUNCH"
CAPABILITY_MIN = 90
LINE_BYTES = tl.constexpr(128)
WHEN_EARLY: bool | int = True
"""What kernels get that are launched early. A number is another step of what they fetch ahead, in bytes, which
`bench.gpu.choices` measures: the second-level cache is filled by sectors of 32."""


@functools.cache
def early_launch(device: torch.device) -> dict[str, bool | int]:
    """What a launch passes on: the kernel's constant EARLY, and whether the card may start it before its predecessor ended."""
    if device.type != "cuda" or interpreted() or os.environ.get(VARIABLE, "1") == "0":
        return {"EARLY": False, "launch_pdl": False}
    early = capability(device) >= CAPABILITY_MIN
    return {"EARLY": WHEN_EARLY if early else False, "launch_pdl": early}


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """What comes next may be handed out once every program has come here; it waits for all of this kernel by itself."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Only weights may be read before, and nothing written."""
    if EARLY:
        gdc_wait()


@triton.jit
def start_in_turn(EARLY: tl.constexpr):
    """For a kernel that has nothing to ask for before."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)


@triton.jit
def fetch_rows(rows, columns, columns_end, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    """Has the second-level cache fetch so many columns of a weight's rows, from `columns` on and before `columns_end`.

    rows: [R] pointers to a row's first column each, all of them readable; every 128 bytes are asked for once,
    or as many as EARLY says.
    """
    if EARLY:
        SIZE: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
        STEP: tl.constexpr = EARLY if EARLY > 1 else LINE_BYTES
        LINE: tl.constexpr = STEP // SIZE
        LINES: tl.constexpr = COLUMNS // LINE if COLUMNS > LINE else 1
        column = columns + tl.arange(0, LINES) * LINE
        places = rows[:, None] + tl.where(column < columns_end, column, 0)[None, :]
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )
