"""Weights of an unquantised checkpoint, quantised while they are read: at most one module is in memory unquantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.config.stored_weights import Activations
from engine.errors import EngineConfigError
from engine.quantization.checkpoint import StackedMatrices
from engine.quantization.products import fp8_product
from engine.weights import LinearStorage, StoredLinear, WeightPlan, copy_checked
from kernels import ops

HEAD = "lm_head"
ROUTER = ".gate"
"""The last part of a router's name. A router is small, and a small difference may change which experts it chooses."""


def int8_packer(weight: torch.Tensor, bias: torch.Tensor | None) -> ops.LinearKernel:
    """weight: [N, K] → 8-bit integers with a scale for each row"""
    return ops.bind_int8(ops.pack_int8(weight), bias)


def fp8_packer(weight: torch.Tensor, bias: torch.Tensor | None) -> ops.LinearKernel:
    """weight: [N, K] → 8-bit floats with a scale for each row; inputs are rounded to 8 bits too, token by token"""
    return fp8_product(ops.pack_fp8(weight), bias, Activations.DYNAMIC)


PACKERS: dict[str, ops.LinearPacker] = {"int8": int8_packer, "fp8": fp8_packer}


class OnTheFlyStorage:
    """The `LinearStorage` that hands each module to `packer` as soon as the last of its matrices was read."""

    def __init__(self, packer: ops.LinearPacker, plain: ops.LinearPacker) -> None:
        self._packer, self._plain = packer, plain

    def linear(
        self, modules: Sequence[tuple[str, int]], columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> PackedOnLoad:
        """Routers stay unquantised; everything else goes to the packer."""
        packer = self._plain if modules[0][0].endswith(ROUTER) else self._packer
        num_bytes = dtype.itemsize if packer is self._plain else 1
        return PackedOnLoad(modules, columns, packer, bias=bias, dtype=dtype, device=device, element_bytes=num_bytes)


class OnTheFlyHeadStorage:
    """The `LinearStorage` that hands an output head of its own to `packer`, and leaves everything else to `fallback`."""

    def __init__(self, fallback: LinearStorage | None, packer: ops.LinearPacker, *, is_plain: bool) -> None:
        self._fallback, self._packer, self._is_plain = fallback, packer, is_plain

    def linear(
        self, modules: Sequence[tuple[str, int]], columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> StoredLinear | None:
        """Raises `EngineConfigError` for a head that the checkpoint holds quantised."""
        fallback = self._fallback
        stored = None if fallback is None else fallback.linear(modules, columns, bias=bias, dtype=dtype, device=device)
        if modules[0][0] != HEAD:
            return stored
        if isinstance(stored, StackedMatrices):
            raise EngineConfigError("head_quantization", "cannot be applied: the checkpoint's output head is quantised already")
        num_bytes = dtype.itemsize if self._is_plain else 1
        return PackedOnLoad(modules, columns, self._packer, bias=bias, dtype=dtype, device=device, element_bytes=num_bytes)


class PackedOnLoad:
    """Stacked matrices that are packed when the last of them has been read. The unpacked tensor exists only from the
    first read to the last."""

    def __init__(
        self,
        modules: Sequence[tuple[str, int]],
        columns: int,
        packer: ops.LinearPacker,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        element_bytes: int,
    ) -> None:
        self._modules, self._packer = modules, packer
        self._shape = (sum(rows for _, rows in modules), columns)
        self._dtype, self._device, self._element_bytes = dtype, device, element_bytes
        self._weight: torch.Tensor | None = None
        self._num_unread = len(modules)
        # Zeros, because a packer may try the kernel before the bias was read.
        self._bias = torch.zeros(self._shape[0], dtype=dtype, device=device) if bias else None
        self._kernel: ops.LinearKernel | None = None

    def plan(self, plan: WeightPlan) -> None:
        start = 0
        for module, rows in self._modules:
            plan.add(f"{module}.weight", _Rows(self, start, (rows, self._shape[1]), self._element_bytes))
            if self._bias is not None:
                plan.add(f"{module}.bias", self._bias.narrow(0, start, rows))
            start += rows

    def pack(self, packer: ops.LinearPacker) -> ops.LinearKernel:  # noqa: ARG002 - for matrices not packed yet
        """The kernel that was packed when the last matrix was read."""
        assert self._kernel is not None, "not all matrices were read"
        return self._kernel

    def load(self, start: int, tensor: torch.Tensor) -> None:
        if self._weight is None:
            self._weight = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        copy_checked(self._weight.narrow(0, start, tensor.shape[0]), tensor)
        self._num_unread -= 1
        if not self._num_unread:
            self._kernel = self._packer(self._weight, self._bias)
            self._weight = None


class _Rows:
    def __init__(self, target: PackedOnLoad, start: int, shape: tuple[int, int], element_bytes: int) -> None:
        self._target, self._start, self._shape = target, start, shape
        self.num_parameters = shape[0] * shape[1]
        self.num_bytes = self.num_parameters * element_bytes

    def load(self, tensor: torch.Tensor) -> None:
        if tensor.shape != self._shape:
            copy_checked(torch.empty(self._shape, device="meta"), tensor)  # raises, naming what is wrong
        self._target.load(self._start, tensor)
