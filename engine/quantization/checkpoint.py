"""Modules of a quantised checkpoint, each in the format of its tensors: 8-bit numbers with scales, words of 4 bits, or plain.

Modules that share their input are one module here. Their matrices are stacked into as few products as possible: neighbours are
joined if they are stored in the same way and quantise their input in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch

from engine.config.stored_weights import Fp8Weights, Int8Weights, MultipliedWeights
from engine.quantization.products import concat_outputs
from engine.quantization.stored_fp8 import Fp8Matrix
from engine.quantization.stored_int4 import Int4Matrix
from engine.quantization.stored_int8 import Int8Matrix
from engine.weights import WeightPlan
from kernels import ops


class StoredMatrix(Protocol):
    """One quantised matrix of the checkpoint. When all are read, neighbours with equal join keys are joined."""

    def plan(self, plan: WeightPlan, module: str) -> None: ...

    def join_key(self) -> object: ...

    def join(self, others: Sequence[Any], bias: torch.Tensor | None) -> ops.LinearKernel: ...


PREFIX = "model."
"""The prefix that the tensor names of some checkpoints lack."""


class CheckpointNames:
    """The modules of a checkpoint, from the names of the tensors in its files. `marker`: the last part of a name that only
    quantised modules have."""

    def __init__(self, names: Set[str], marker: str) -> None:
        self._names = {name for stored in names for name in (stored, PREFIX + stored)}
        self._marker = marker

    def is_quantised(self, module: str) -> bool:
        return self.has(module, self._marker)

    def has(self, module: str, last: str) -> bool:
        return f"{module}.{last}" in self._names

    def biased(self, modules: Sequence[tuple[str, int]], *, bias: bool) -> list[str]:
        """The modules with a bias: all of them, or those for which one is stored, as some GPTQ packers do."""
        return [module for module, _ in modules if bias or self.has(module, "bias")]


class CheckpointStorage:
    """The `LinearStorage` of a quantised checkpoint. `names` are those of the tensors in its files."""

    def __init__(self, weights: MultipliedWeights, names: Set[str], *, row_invariant: bool) -> None:
        self._weights = weights
        self._names = CheckpointNames(names, weights.marker)
        self._row_invariant = row_invariant

    def linear(
        self, modules: Sequence[tuple[str, int]], columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> StackedMatrices | None:
        """None when none of the modules is quantised."""
        if not any(self._names.is_quantised(module) for module, _ in modules):
            return None
        matrices: list[tuple[str, int, StoredMatrix | torch.Tensor]] = []
        for module, rows in modules:
            if self._names.is_quantised(module):
                matrices.append((module, rows, self._stored_matrix(module, rows, columns, device)))
            else:
                matrices.append((module, rows, torch.empty(rows, columns, dtype=dtype, device=device)))
        biased = self._names.biased(modules, bias=bias)
        return StackedMatrices(matrices, columns, biased, dtype=dtype, device=device, row_invariant=self._row_invariant)

    def _stored_matrix(self, module: str, rows: int, columns: int, device: torch.device) -> StoredMatrix:
        if isinstance(self._weights, Fp8Weights):
            return Fp8Matrix(rows, columns, self._weights.activations, device=device)
        if isinstance(self._weights, Int8Weights):
            return Int8Matrix(rows, columns, self._weights, device=device)
        return Int4Matrix(module, rows, columns, self._weights, device=device)


class StackedMatrices:
    """The matrices of one fused module. Some GPTQ packers store a bias where the model has none; it is added."""

    def __init__(
        self,
        matrices: Sequence[tuple[str, int, StoredMatrix | torch.Tensor]],
        columns: int,
        biased: Sequence[str],
        *,
        dtype: torch.dtype,
        device: torch.device,
        row_invariant: bool,
    ) -> None:
        self._matrices, self._columns, self._biased = matrices, columns, biased
        self._dtype, self._device, self._row_invariant = dtype, device, row_invariant
        rows = sum(size for _, size, _ in matrices)
        self._bias = torch.zeros(rows, dtype=dtype, device=device) if biased else None

    def plan(self, plan: WeightPlan) -> None:
        start = 0
        for module, rows, matrix in self._matrices:
            if isinstance(matrix, torch.Tensor):
                plan.add(f"{module}.weight", matrix)
            else:
                matrix.plan(plan, module)
            if self._bias is not None and module in self._biased:
                plan.add(f"{module}.bias", self._bias.narrow(0, start, rows))
            start += rows

    def pack(self, packer: ops.LinearPacker) -> ops.LinearKernel:
        """`packer` is for the parts that are plain."""
        kernels, start = [], 0
        for _, group in groupby(self._matrices, key=lambda entry: _join_key(entry[2])):
            members = list(group)
            rows = sum(size for _, size, _ in members)
            bias = None if self._bias is None else self._bias.narrow(0, start, rows)
            kernels.append(self._product([matrix for _, _, matrix in members], bias, packer))
            start += rows
        return concat_outputs(kernels)

    def _product(
        self, matrices: Sequence[StoredMatrix | torch.Tensor], bias: torch.Tensor | None, packer: ops.LinearPacker
    ) -> ops.LinearKernel:
        first, *others = matrices
        if isinstance(first, torch.Tensor):
            weights = [part for part in matrices if isinstance(part, torch.Tensor)]
            return packer(first if not others else torch.cat(weights), bias)
        kernel = first.join(others, bias)
        if not self._row_invariant:
            return kernel
        invariant = partial(ops.row_invariant, num_columns=self._columns, dtype=self._dtype, device=self._device)
        return concat_outputs([invariant(part) for part in getattr(kernel, "parts", [kernel])])


def _join_key(matrix: StoredMatrix | torch.Tensor) -> object:
    return "plain" if isinstance(matrix, torch.Tensor) else ("quantised", matrix.join_key())
