"""An unquantised linear layer: a matrix of 16 or 32 bits as loaded from the checkpoint."""

from __future__ import annotations

import torch

from kernels.plain_weights import PlainWeights
from kernels.triton.linear import linear


class PlainLinear(PlainWeights):
    """[T, in] → [T, out]: our own kernel for few rows, cuBLAS for many."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, bias=self.bias)
