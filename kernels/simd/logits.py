"""The divisor and the soft-cap of logits that some models have. Reads and writes each element once."""

from __future__ import annotations

import torch

from kernels.simd.compiling import entry, task
from kernels.simd.launching import Launch
from kernels.simd.threads import argument, float_argument, run, thread_range
from kernels.simd.vectors import BYTES, LANES, masked_load, masked_store, splat, tanh


@task
def _cap_rows(a):
    logits, size, divisor, softcap = argument(a, 0), argument(a, 2), float_argument(a, 3), float_argument(a, 4)
    first, end = thread_range(a, argument(a, 1))
    for row in range(first, end):
        values = logits + row * size * BYTES
        for i in range(0, size, LANES):
            value = masked_load(values, i, size) / splat(divisor)
            if softcap > 0:
                value = tanh(value / splat(softcap)) * splat(softcap)
            masked_store(values, i, size, value)


@entry(6, 2)
def _run(pool, threads, task, logits, num_rows, size, divisor, softcap):
    run(pool, threads, task, (logits, num_rows, size, divisor, softcap))


_cap = Launch(_run, _cap_rows, num_rows_at=1, num_floats=2)

_OPERATIONS_PER_LOGIT = 8
"""Approximate work per logit, in multiplications."""


def cap_logits(logits: torch.Tensor, *, divisor: float = 1.0, softcap: float | None = None) -> torch.Tensor:
    """As `kernels.torch.logits.cap_logits`; softcap > 0."""
    assert logits.dtype is torch.float32
    assert logits.is_contiguous(), "rows are changed in place"
    num_rows, size = logits.shape
    work = logits.numel() * _OPERATIONS_PER_LOGIT if num_rows > 1 else 0
    _cap(work, logits.data_ptr(), num_rows, size, divisor, softcap or 0.0)
    return logits
