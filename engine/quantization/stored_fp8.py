"""One matrix of 8-bit floats as checkpoints store it: `weight`, `weight_scale` and, with static activations, `input_scale`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from engine.config.stored_weights import Activations
from engine.quantization.destinations import Fp8CodesDestination, ScaleDestination
from engine.quantization.products import fp8_product
from engine.weights import WeightPlan
from kernels import ops


class Fp8Matrix:
    """[rows, columns] in E4M3 (arXiv 2209.05433); a scale for the whole matrix is the scale of each of its rows."""

    def __init__(self, rows: int, columns: int, activations: Activations, *, device: torch.device) -> None:
        self._values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
        self._scales = torch.empty(rows, 1, dtype=torch.float32, device=device)
        self._activations = activations
        self._input_scale: torch.Tensor | None = None
        if activations is Activations.STATIC:
            self._input_scale = torch.empty(1, dtype=torch.float32, device=device)

    def plan(self, plan: WeightPlan, module: str) -> None:
        plan.add(f"{module}.weight", Fp8CodesDestination(self._values))
        plan.add(f"{module}.weight_scale", ScaleDestination(self._scales))
        if self._input_scale is not None:
            plan.add(f"{module}.input_scale", ScaleDestination(self._input_scale, is_divisor=True))

    def join_key(self) -> object:
        """All can be joined: weights have a scale for each row, and static input scales are kept with their numbers of rows."""
        return None

    def join(self, others: Sequence[Any], bias: torch.Tensor | None) -> ops.LinearKernel:
        matrices = [self, *others]
        scales = torch.cat([matrix._scales for matrix in matrices]).squeeze(1)
        values = self._values if not others else torch.cat([matrix._values.view(torch.uint8) for matrix in matrices])
        weight = ops.Fp8Weight(values.view(torch.float8_e4m3fn), scales)
        return fp8_product(weight, bias, self._activations, _input_scale_runs(matrices))


def _input_scale_runs(matrices: Sequence[Fp8Matrix]) -> list[tuple[int, torch.Tensor]]:
    """Static scales of inputs, each with the number of rows of its weight: one for neighbours whose scales are equal."""
    scaled = [(matrix._values.shape[0], matrix._input_scale) for matrix in matrices if matrix._input_scale is not None]
    runs = [list(run) for _, run in groupby(scaled, key=lambda pair: pair[1].item())]
    return [(sum(num_rows for num_rows, _ in run), run[0][1]) for run in runs]
