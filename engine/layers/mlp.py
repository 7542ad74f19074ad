"""The gated feed-forward part of a layer: down(act(gate(x)) · up(x)) (arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.layers.linear import FusedLinear
from engine.weights import WeightPlan
from kernels import ops

GATED_ACTIVATIONS = {"silu": "silu_mul", "gelu_pytorch_tanh": "gelu_tanh_mul"}
"""The operation for each activation name of the configuration."""


class GatedMLP:
    """Gate and up projections are one product. `gate_up` and `down` are the checkpoint's names; `gate_up` may be one."""

    def __init__(
        self,
        hidden_size: int,
        inner: int,
        *,
        activation: str,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        gate_up: Sequence[str],
        down: str = "down_proj",
    ) -> None:
        parts = [(name, 2 * inner // len(gate_up)) for name in gate_up]
        self._gate_up = FusedLinear(parts, hidden_size, bias=bias, dtype=dtype, device=device)
        self._down = FusedLinear([(down, hidden_size)], inner, bias=bias, dtype=dtype, device=device)
        self.gate = "silu" if activation == "silu" else "gelu_tanh"
        table, name = ops.operations(device, dtype), GATED_ACTIVATIONS[activation]
        self._activate: Callable[[torch.Tensor], torch.Tensor] = getattr(table, name)
        self._activate_fp8: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = getattr(table, f"{name}_fp8")

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        self._gate_up.plan(plan, prefix)
        self._down.plan(plan, prefix)

    def pack(self, packer: ops.LinearPacker = ops.pack_linear) -> None:
        self._gate_up.pack(packer)
        self._down.pack(packer)

    @property
    def fusible_products(self) -> tuple[ops.FusibleProduct | None, ops.FusibleProduct | None]:
        """The products before and after the activation, each None where it cannot be fused with the operations around it."""
        return self._gate_up.fusible, self._down.fusible

    @property
    def weights(self) -> tuple[Any, Any]:
        """The weights before and after the activation, plain or quantised; None as for `FusedLinear.weight`."""
        return self._gate_up.weight, self._down.weight

    @property
    def takes_fp8_rows(self) -> bool:
        return self._gate_up.takes_fp8_rows

    def __call__(self, x: torch.Tensor | ops.Fp8Rows) -> torch.Tensor:
        gate_up = self._gate_up(x)
        if self._activate_fp8 is not None and self._down.takes_fp8_rows and gate_up.shape[0] > ops.FUSED_ROWS_MAX:
            return self._down(ops.Fp8Rows(*self._activate_fp8(gate_up), gate_up.dtype))
        return self._down(self._activate(gate_up))
