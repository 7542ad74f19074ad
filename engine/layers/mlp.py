"""The gated feed-forward part of a layer: down(silu(gate(x)) · up(x)) (arXiv 2002.05202)."""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from engine.layers.linear import FusedLinear
from engine.weights import WeightPlan
from kernels import ops


class GatedMLP:
    """Gate and up projections are one product."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        inner, bias = config.intermediate_size, config.mlp_bias
        parts = [("gate_proj", inner), ("up_proj", inner)]
        self._gate_up = FusedLinear(parts, config.hidden_size, bias=bias, dtype=dtype, device=device)
        self._down = FusedLinear([("down_proj", config.hidden_size)], inner, bias=bias, dtype=dtype, device=device)

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        self._gate_up.plan(plan, prefix)
        self._down.plan(plan, prefix)

    def pack(self) -> None:
        self._gate_up.pack()
        self._down.pack()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(ops.silu_mul(self._gate_up(x)))
