"""One matrix of 4-bit codes as AWQ and GPTQ checkpoints store it: `qweight`, `qzeros`, `scales` and, for GPTQ, `g_idx`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.config.stored_weights import Int4Layout, Int4Weights
from engine.errors import WeightsError
from engine.quantization.places import CodesPlace, GroupScalesPlace, OrderPlace
from engine.weights import WeightPlan
from kernels import ops

CODES_PER_WORD = 8


class Int4Matrix:
    """[rows, columns] as (code - zero) · scale. The layouts are those of the methods' own packers: see `kernels.ops.pack_awq`
    and `pack_gptq`, which read them."""

    def __init__(self, rows: int, columns: int, stored: Int4Weights, *, device: torch.device) -> None:
        self._stored, self._module = stored, ""
        num_groups = 1 if stored.group_size is None else -(-columns // stored.group_size)
        words = (columns, rows // CODES_PER_WORD)
        if stored.layout is Int4Layout.GPTQ:
            words = (columns // CODES_PER_WORD, rows)
        self._codes = CodesPlace(words, device, are_parameters=True)
        self._zeros = CodesPlace((num_groups, rows // CODES_PER_WORD), device, are_parameters=False)
        self._scales = GroupScalesPlace((num_groups, rows), device)
        self._order = OrderPlace(columns, stored.group_size or columns, device)
        self._packed: ops.Int4Weight | None = None

    def plan(self, plan: WeightPlan, module: str) -> None:
        self._module = module
        plan.add(f"{module}.qweight", self._codes)
        plan.add(f"{module}.qzeros", self._zeros)
        plan.add(f"{module}.scales", self._scales)
        if self._stored.layout is Int4Layout.GPTQ:
            plan.add(f"{module}.g_idx", self._order, optional=True)

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
            try:
                self._packed = self._pack_layout(self._stored.group_size or -1)
            except ValueError as error:
                raise WeightsError(f"the 4-bit weights of {self._module} cannot be used: {error}") from error
            self._codes.tensor = self._zeros.tensor = self._scales.tensor = torch.empty(0)
        return self._packed

    def _pack_layout(self, group_size: int) -> ops.Int4Weight:
        codes, zeros, scales = self._codes.tensor, self._zeros.tensor, self._scales.tensor
        if self._stored.layout is Int4Layout.AWQ:
            return ops.pack_awq(codes, zeros, scales, group_size)
        minus_one = self._stored.zero_offset == 1
        return ops.pack_gptq(codes, zeros, scales, self._order.tensor, group_size, zeros_minus_one=minus_one)
