"""One matrix of 8-bit floats as checkpoints store it: `weight`, `weight_scale` and, with static activations, `input_scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.config.quantization import Activations
from engine.quantization.places import Fp8CodesPlace, ScalePlace
from engine.quantization.products import fp8_product
from engine.runner.weights import WeightPlan
from kernels import ops


class Fp8Part:
    """[rows, columns] in E4M3 (arXiv 2209.05433); a scale for the whole matrix is the scale of each of its rows."""

    def __init__(self, rows: int, columns: int, activations: Activations, *, device: torch.device) -> None:
        self._values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
        self._scales = torch.empty(rows, 1, dtype=torch.float32, device=device)
        self._activations = activations
        self._input_scale: torch.Tensor | None = None
        if activations is Activations.STATIC:
            self._input_scale = torch.empty(1, dtype=torch.float32, device=device)

    def plan(self, plan: WeightPlan, module: str) -> None:
        plan.add(f"{module}.weight", Fp8CodesPlace(self._values))
        plan.add(f"{module}.weight_scale", ScalePlace(self._scales))
        if self._input_scale is not None:
            plan.add(f"{module}.input_scale", ScalePlace(self._input_scale))

    def key(self) -> object:
        """Static scales that differ round the same input in different ways."""
        return None if self._input_scale is None else self._input_scale.item()

    def join(self, others: Sequence[Any], bias: torch.Tensor | None) -> ops.LinearKernel:
        parts = [self, *others]
        scales = torch.cat([part._scales for part in parts]).squeeze(1)
        values = self._values if not others else torch.cat([part._values.view(torch.uint8) for part in parts])
        weight = ops.Fp8Weight(values.view(torch.float8_e4m3fn), scales)
        return fp8_product(weight, bias, self._activations, self._input_scale)
