"""One matrix of 4-bit codes as AWQ, GPTQ and compressed-tensors store it, packed to the one layout of the products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.config.stored_weights import GroupLayout, Int4Weights
from engine.quantization.group_tensors import GroupTensors
from engine.weights import WeightPlan
from kernels import ops


class Int4Matrix:
    """[rows, columns] as (code - zero) · scale. The layouts are those of the methods' own packers: see `kernels.ops.pack_awq`
    and `pack_gptq`, which read them."""

    def __init__(self, module: str, rows: int, columns: int, stored: Int4Weights, *, device: torch.device) -> None:
        self._stored = stored
        self._tensors = GroupTensors(module, rows, columns, stored, device=device)
        self._packed: ops.Int4Weight | None = None

    def plan(self, plan: WeightPlan, module: str) -> None:
        for last, destination in self._tensors.destinations().items():
            plan.add(f"{module}.{last}", destination, optional=last in self._tensors.optional)

    def join_key(self) -> object:
        """Columns sorted in different ways belong to different inputs."""
        packed = self._pack()
        return packed.scale_dtype, None if packed.permutation is None else tuple(packed.permutation.tolist())

    def join(self, others: Sequence[Any], bias: torch.Tensor | None) -> ops.LinearKernel:
        weights = [matrix._pack() for matrix in (self, *others)]
        joined = weights[0]
        if others:
            joined = replace(
                joined,
                words=torch.cat([weight.words for weight in weights], dim=1),
                scales_zeros=torch.cat([weight.scales_zeros for weight in weights], dim=1),
            )
        return ops.bind_int4(joined, bias)

    def _pack(self) -> ops.Int4Weight:
        if self._packed is None:
            self._packed = self._pack_layout()
            self._tensors.release()
        return self._packed

    def _pack_layout(self) -> ops.Int4Weight:
        codes, zeros, scales = self._tensors.codes, self._tensors.zeros, self._tensors.scales
        group_size = self._stored.group_size or -1
        if self._stored.layout is GroupLayout.AWQ:
            return ops.pack_awq(codes, zeros, scales, group_size)
        minus_one = self._stored.zero_offset == 1
        return ops.pack_gptq(codes, zeros, scales, self._tensors.order, group_size, zeros_minus_one=minus_one)
