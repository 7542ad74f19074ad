"""RMS normalisation with its weight (arXiv 1910.07467), and layer normalisation (arXiv 1607.06450)."""

from __future__ import annotations

import torch

from engine.weights import WeightPlan
from kernels import ops


class RMSNorm:
    """Normalises the last dimension, `size` wide. With `offset` the checkpoint stores weight - 1 (Gemma).

    Such a weight is kept in float32: one plus a small number would lose most of it in 16 bits.
    """

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, offset: bool) -> None:
        self.weight = torch.empty(size, dtype=torch.float32 if offset else dtype, device=device)
        self.eps = eps
        self._offset = offset
        self._ops = ops.operations(device, dtype)
        self._quantises_output = False

    def plan(self, plan: WeightPlan, name: str) -> None:
        plan.add(f"{name}.weight", self.weight)

    def pack(self) -> None:
        """Prepare the loaded weight, once."""
        if self._offset:
            self.weight += 1.0
            self._offset = False

    def set_consumer(self, *, takes_fp8_rows: bool) -> None:
        """Call this if a single product reads the output. If it takes rows in 8 bits, `norm_for_consumer` quantises them,
        provided that there is a kernel for it and that there are more rows than the product multiplies unrounded."""
        self._quantises_output = takes_fp8_rows and self._ops.rms_norm_fp8 is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def norm_for_consumer(self, x: torch.Tensor) -> torch.Tensor | ops.Fp8Rows:
        """The normalised rows in the form that the consumer takes. x: [T, hidden]"""
        if self._quantises_output and x.shape[0] > ops.FUSED_ROWS_MAX and self._ops.rms_norm_fp8 is not None:
            return ops.Fp8Rows(*self._ops.rms_norm_fp8(x, self.weight, self.eps), x.dtype)
        return self(x)

    def add_norm_for_consumer(
        self, branch: torch.Tensor, residual: torch.Tensor, *, alpha: float, branch_weight: torch.Tensor | None
    ) -> tuple[torch.Tensor | ops.Fp8Rows, torch.Tensor]:
        """`norm_for_consumer` of the sum residual + alpha · branch, and the sum itself. `branch_weight` is the weight of a norm
        applied to the branch first."""
        if self._quantises_output and residual.shape[0] > ops.FUSED_ROWS_MAX and self._ops.add_rms_norm_fp8 is not None:
            values, scales, total = self._ops.add_rms_norm_fp8(
                branch, residual, self.weight, self.eps, alpha=alpha, branch_weight=branch_weight
            )
            return ops.Fp8Rows(values, scales, total.dtype), total
        return self._ops.add_rms_norm(branch, residual, self.weight, self.eps, alpha=alpha, branch_weight=branch_weight)


class LayerNorm:
    """Normalises the last dimension, `size` wide, with weight and bias."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.bias = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def plan(self, plan: WeightPlan, name: str) -> None:
        plan.add(f"{name}.weight", self.weight)
        plan.add(f"{name}.bias", self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)
