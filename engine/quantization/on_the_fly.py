"""Weights of an unquantised checkpoint, or of one that must be decoded, quantised while they are read: at most one module is in
memory unquantised."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from engine.config.stored_weights import Activations
from engine.errors import EngineConfigError
from engine.quantization.checkpoint import StackedMatrices
from engine.quantization.decoding import Decode, DecodedCheckpoint, DecodedRows
from engine.quantization.products import fp8_product
from engine.weights import Destination, LinearStorage, StoredLinear, WeightPlan, copy_checked
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
    """The `LinearStorage` that hands each module to `packer` as soon as the last of its matrices was read. `checkpoint`
    decodes matrices that are stored quantised."""

    def __init__(self, packer: ops.LinearPacker, plain: ops.LinearPacker, checkpoint: DecodedCheckpoint | None = None) -> None:
        self._packer, self._plain, self._checkpoint = packer, plain, checkpoint

    def linear(
        self, modules: Sequence[tuple[str, int]], columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> PackedOnLoad:
        """Routers stay unquantised; everything else goes to the packer."""
        packer = self._plain if modules[0][0].endswith(ROUTER) else self._packer
        num_bytes = dtype.itemsize if packer is self._plain else 1
        return PackedOnLoad(
            modules,
            columns,
            packer,
            bias=bias,
            dtype=dtype,
            device=device,
            element_bytes=num_bytes,
            checkpoint=self._checkpoint,
        )


class OnTheFlyHeadStorage:
    """The `LinearStorage` that leaves an output head of its own to `head`, and everything else to `fallback`."""

    def __init__(self, fallback: LinearStorage | None, head: OnTheFlyStorage) -> None:
        self._fallback, self._head = fallback, head

    def linear(
        self, modules: Sequence[tuple[str, int]], columns: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> StoredLinear | None:
        """Raises `EngineConfigError` for a head that the checkpoint holds quantised, unless it is decoded."""
        fallback = self._fallback
        stored = None if fallback is None else fallback.linear(modules, columns, bias=bias, dtype=dtype, device=device)
        if modules[0][0] != HEAD:
            return stored
        if isinstance(stored, StackedMatrices):
            raise EngineConfigError("head_quantization", "cannot be applied: the checkpoint's output head is quantised already")
        return self._head.linear(modules, columns, bias=bias, dtype=dtype, device=device)


class PackedOnLoad:
    """Stacked matrices that are packed when the last of them and of their biases has been read: kernels may copy a bias. The
    unpacked tensor exists only from the first read to the last. On the meta device they are checked and not packed."""

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
        checkpoint: DecodedCheckpoint | None,
    ) -> None:
        self._modules, self._packer, self._checkpoint = modules, packer, checkpoint
        self._shape = (sum(rows for _, rows in modules), columns)
        self._dtype, self._device, self._element_bytes = dtype, device, element_bytes
        self._weight: torch.Tensor | None = None
        self._biased = [module for module, _ in modules if bias]
        if checkpoint is not None:
            self._biased = checkpoint.names.biased(modules, bias=bias)
        self._num_unread = len(modules) + len(self._biased)
        self._bias = torch.zeros(self._shape[0], dtype=dtype, device=device) if self._biased else None
        self._kernel: ops.LinearKernel | None = None

    def plan(self, plan: WeightPlan) -> None:
        start, columns = 0, self._shape[1]
        for module, rows in self._modules:
            num_bytes = rows * columns * self._element_bytes
            if self._checkpoint is not None and self._checkpoint.names.is_quantised(module):
                encoded = self._checkpoint.matrix(module, rows, columns, self._device)
                decoded = DecodedRows(encoded, rows * columns, num_bytes, partial(self.fill, start, rows))
                decoded.plan(plan, module, self._checkpoint.names)
            else:
                plan.add(f"{module}.weight", _Rows(self, start, (rows, columns), num_bytes))
            if self._bias is not None and module in self._biased:
                plan.add(f"{module}.bias", _Bias(self, self._bias.narrow(0, start, rows)))
            start += rows

    def pack(self, packer: ops.LinearPacker) -> ops.LinearKernel:  # noqa: ARG002 - for matrices not packed yet
        """The kernel that was packed when the last matrix was read."""
        assert self._kernel is not None, "not all matrices were read"
        return self._kernel

    def load(self, start: int, tensor: torch.Tensor) -> None:
        """Take one matrix, whose rows begin at `start`."""
        self.fill(start, tensor.shape[0], lambda rows: copy_checked(rows, tensor))

    def fill(self, start: int, num_rows: int, write: Decode) -> None:
        """As `load`, for a matrix that `write` writes into its rows."""
        if self._weight is None:
            self._weight = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        write(self._weight.narrow(0, start, num_rows))
        self.count_read()

    def count_read(self) -> None:
        """Call when a matrix or a bias was read; packs them at the last one."""
        self._num_unread -= 1
        if not self._num_unread:
            assert self._weight is not None, "every module has a matrix"
            if not self._weight.is_meta:
                self._kernel = self._packer(self._weight, self._bias)
            self._weight = None


class _Rows(Destination):
    def __init__(self, target: PackedOnLoad, start: int, shape: tuple[int, int], num_bytes: int) -> None:
        self._target, self._start, self._shape = target, start, shape
        self.num_parameters = shape[0] * shape[1]
        self.num_bytes = num_bytes

    def load(self, tensor: torch.Tensor) -> None:
        if tensor.shape != self._shape:
            copy_checked(torch.empty(self._shape, device="meta"), tensor)  # raises, naming what is wrong
        self._target.load(self._start, tensor)


class _Bias(Destination):
    def __init__(self, target: PackedOnLoad, rows: torch.Tensor) -> None:
        self._target, self._rows = target, rows
        self.num_parameters, self.num_bytes = rows.numel(), rows.nbytes

    def load(self, tensor: torch.Tensor) -> None:
        copy_checked(self._rows, tensor)
        self._target.count_read()
