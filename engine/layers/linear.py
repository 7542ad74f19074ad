"""Matrix products with weights, several of the checkpoint's matrices fused into one where they share their input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.weights import StoredLinear, WeightPlan
from kernels import ops


class FusedLinear:
    """y = x Wᵀ + b, where W stacks the matrices `parts` = [(checkpoint name, rows), …].

    Plain tensors while weights are loaded, or in the form of the plan's `storage`; after `pack` only the kernel's form remains.
    """

    def __init__(
        self, parts: Sequence[tuple[str, int]], columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts, self._columns, self._has_bias = parts, columns, bias
        self._dtype, self._device = dtype, device
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._stored: StoredLinear | None = None
        self._kernel: ops.LinearKernel | None = None

    def tie(self, weight: torch.Tensor) -> None:
        """Multiply by the weights of another module, which loads them; `plan` is not called then."""
        self._weight = weight

    def plan(self, plan: WeightPlan, prefix: str = "") -> None:
        """Load each part of the checkpoint into its rows of the stacked matrix."""
        assert self._kernel is None, "the weights are packed already"
        modules = [(f"{prefix}.{name}" if prefix else name, size) for name, size in self._parts]
        if plan.storage is not None:
            self._stored = plan.storage.linear(
                modules, self._columns, bias=self._has_bias, dtype=self._dtype, device=self._device
            )
        if self._stored is not None:
            self._stored.plan(plan)
            return
        start, rows = 0, sum(size for _, size in modules)
        self._weight = torch.empty(rows, self._columns, dtype=self._dtype, device=self._device)
        self._bias = torch.empty(rows, dtype=self._dtype, device=self._device) if self._has_bias else None
        for module, size in modules:
            plan.add(f"{module}.weight", self._weight.narrow(0, start, size))
            if self._bias is not None:
                plan.add(f"{module}.bias", self._bias.narrow(0, start, size))
            start += size

    def pack(self, packer: ops.LinearPacker = ops.pack_linear) -> None:
        """Bind the loaded weights to a kernel and release the plain tensor."""
        if self._stored is not None:
            self._kernel, self._stored = self._stored.pack(packer), None
            return
        assert self._weight is not None, "there are no weights, or they are packed already"
        self._kernel = packer(self._weight, self._bias)
        self._weight = None

    @property
    def fusible(self) -> ops.FusibleProduct | None:
        """See `ops.fusible_form`."""
        return ops.fusible_form(self._kernel)

    @property
    def weight(self) -> Any:
        """The weights, plain or quantised, if another kernel may multiply with them instead: there is no bias, or one of zeros.
        None if the kernel keeps its weights in a form of its own."""
        kernel: Any = self._kernel
        if not isinstance(kernel, ops.HasWeight) or (kernel.bias is not None and bool(kernel.bias.any())):
            return None
        return kernel.weight

    @property
    def takes_fp8_rows(self) -> bool:
        """Whether the preceding operation may quantise the rows that this product multiplies."""
        return isinstance(self._kernel, ops.Fp8Product) and self._kernel.takes_rows

    def __call__(self, x: torch.Tensor | ops.Fp8Rows) -> torch.Tensor:
        """`Fp8Rows` only where it takes them."""
        assert self._kernel is not None, "the weights are not packed yet"
        return self._kernel(x)  # type: ignore[arg-type]
