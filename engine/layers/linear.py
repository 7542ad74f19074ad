"""Matrix products with weights, several of the checkpoint's matrices fused into one where they share their input."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.runner.weights import WeightPlan
from kernels import ops


class FusedLinear:
    """y = x Wᵀ + b, where W stacks the matrices `parts` = [(checkpoint name, rows), …].

    Plain tensors while weights are loaded; after `pack` only the kernel's own form remains.
    """

    def __init__(
        self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts = parts
        rows = sum(size for _, size in parts)
        self._weight: torch.Tensor | None = torch.empty(rows, columns, dtype=dtype, device=device)
        self._bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        self._kernel: ops.LinearKernel | None = None

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        """Each part of the checkpoint goes to its rows here."""
        assert self._weight is not None, "the weights are packed already"
        start = 0
        for name, size in self._parts:
            plan.add(f"{prefix}.{name}.weight", self._weight.narrow(0, start, size))
            if self._bias is not None:
                plan.add(f"{prefix}.{name}.bias", self._bias.narrow(0, start, size))
            start += size

    def pack(self, packer: ops.LinearPacker = ops.pack_linear) -> None:
        """Bind the loaded weights to a kernel and let go of the plain tensor."""
        assert self._weight is not None, "the weights are packed already"
        self._kernel = packer(self._weight, self._bias)
        self._weight = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._kernel is not None, "the weights are not packed yet"
        return self._kernel(x)
