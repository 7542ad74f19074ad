"""One matrix of 8-bit integers as compressed-tensors stores it: `weight` or `weight_packed`, and `weight_scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.config.stored_weights import Int8Weights
from engine.quantization.destinations import IgnoredDestination, Int8CodesDestination, ScaleDestination, ShapeDestination
from engine.weights import WeightPlan
from kernels import ops

INPUT_TENSORS = ("input_scale", "input_zero_point")
"""Scales by which inputs would be rounded, which is not done here."""


class Int8Matrix:
    """[rows, columns] int8; a scale for the whole matrix is the scale of each of its rows. Inputs are not rounded."""

    def __init__(self, rows: int, columns: int, stored: Int8Weights, *, device: torch.device) -> None:
        self._values = torch.empty(rows, columns, dtype=torch.int8, device=device)
        self._scales = torch.empty(rows, 1, dtype=torch.float32, device=device)
        self._is_packed = stored.is_packed

    def plan(self, plan: WeightPlan, module: str) -> None:
        codes = "weight_packed" if self._is_packed else "weight"
        plan.add(f"{module}.{codes}", Int8CodesDestination(self._values, packed=self._is_packed))
        plan.add(f"{module}.weight_scale", ScaleDestination(self._scales))
        if self._is_packed:
            plan.add(f"{module}.weight_shape", ShapeDestination(*self._values.shape))
        else:
            for last in INPUT_TENSORS:
                plan.add(f"{module}.{last}", IgnoredDestination(), optional=True)

    def join_key(self) -> object:
        """All can be joined: there is a scale for each row."""
        return None

    def join(self, others: Sequence[Any], bias: torch.Tensor | None) -> ops.LinearKernel:
        matrices = [self, *others]
        values = self._values if not others else torch.cat([matrix._values for matrix in matrices])
        scales = torch.cat([matrix._scales for matrix in matrices]).squeeze(1)
        return ops.bind_int8(ops.Int8Weight(values, scales), bias)
