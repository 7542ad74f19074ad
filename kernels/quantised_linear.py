"""Products with quantised weights, by the device of their input."""

from __future__ import annotations

from kernels.cpu.decoded_linear import linear_fp8, linear_int4, linear_int8
from kernels.cpu.fp8_rows import quantize_rows_fp8, to_fp8

__all__ = ["linear_fp8", "linear_int4", "linear_int8", "quantize_rows_fp8", "to_fp8"]
