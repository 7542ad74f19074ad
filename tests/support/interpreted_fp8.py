"""Corrects rounding to e4m3 in Triton's interpreter, which omits the carry into the exponent (7.9 becomes 4).

Seen in 3.6.0 and 3.9.0; without this, every 13th value of a comparison would be half of the right one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch


def correct_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the length of a test, use torch's conversion from float32 to e4m3 in the interpreter. Compiled kernels are not
    affected. Values beyond 448 are NaN in torch: kernels clamp them first."""
    from triton.runtime import interpreter

    convert: Callable[[Any, Any, Any, Any], Any] = interpreter._convert_float

    def corrected(values: Any, kind: Any, wanted: Any, rounding: Any) -> Any:
        if str(kind) != "fp32" or str(wanted) != "fp8e4nv":
            return convert(values, kind, wanted, rounding)
        floats = np.frombuffer(values.tobytes(), dtype=np.float32).copy()
        rounded = torch.from_numpy(floats).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return rounded.reshape(values.shape)

    monkeypatch.setattr(interpreter, "_convert_float", corrected)
