"""Places for the tensors of quantised checkpoints that are not plain matrices: scales, packed codes, column orders."""

from __future__ import annotations

import torch

from engine.errors import WeightsError
from engine.weights import copy_checked
from kernels import ops

NAN_BITS = 0x7F
"""The bits of NaN in e4m3 without the sign: the only code that is not a number."""

CHECK_CHUNK_BYTES = 1 << 20
"""Checked at a time on a CPU, so that intermediate results stay in the second-level cache: five times faster."""


class ScalePlace:
    """Fills `target`, [rows, 1] or [1] float32, from one number, or from one for each row. `is_divisor`: none may be zero."""

    num_parameters = 0

    def __init__(self, target: torch.Tensor, *, is_divisor: bool = False) -> None:
        self._target, self._is_divisor = target, is_divisor
        self.num_bytes = target.nbytes

    def load(self, tensor: torch.Tensor) -> None:
        rows = self._target.shape[0]
        if tensor.numel() not in (1, rows) or tensor.dim() > 2 or (tensor.numel() > 1 and tensor.shape[0] != rows):
            one_each = "" if rows == 1 else f" or [{rows}, 1]"
            raise WeightsError(f"has shape {tuple(tensor.shape)}, expected one number{one_each}; blocks are not supported")
        numbers = checked_scales(tensor)
        if self._is_divisor and not bool(numbers.all()):
            raise WeightsError("is zero")
        self._target.copy_(numbers.reshape(-1, *[1] * (self._target.dim() - 1)))


def checked_scales(tensor: torch.Tensor) -> torch.Tensor:
    """In float32. Raises `WeightsError`, without the name of the tensor, unless all are finite and none is negative."""
    numbers = _finite_scales(tensor)
    if bool((numbers < 0).any()):
        raise WeightsError("holds negative scales")
    return numbers


def _finite_scales(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        raise WeightsError(f"is {tensor.dtype}, expected a floating-point type")
    numbers = tensor.float()
    if not bool(numbers.isfinite().all()):
        raise WeightsError("holds scales that are not finite")
    return numbers


class Fp8CodesPlace:
    """Fills `target`, [rows, columns] float8_e4m3fn. The two codes that are no numbers are refused: products on CPUs read them
    as 480."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self.num_parameters = target.numel()
        self.num_bytes = target.nbytes

    def load(self, tensor: torch.Tensor) -> None:
        copy_checked(self._target, tensor)
        codes = tensor if self._target.is_meta else self._target
        num_rows = max(1, CHECK_CHUNK_BYTES // codes.shape[1]) if codes.device.type == "cpu" else codes.shape[0]
        if any(int(rows.bitwise_and(NAN_BITS).amax()) == NAN_BITS for rows in torch.split(codes.view(torch.uint8), num_rows)):
            raise WeightsError("holds codes that are no numbers (NaN)")


class CodesPlace:
    """Keeps words of codes as they are. `are_parameters`: else they are zero points, whose bytes count with those of their
    scales."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, *, are_parameters: bool) -> None:
        self.tensor = torch.empty(shape, dtype=torch.int32, device=device)
        self.num_parameters = self.tensor.numel() * 8 if are_parameters else 0
        self.num_bytes = self.tensor.nbytes if are_parameters else 0

    def load(self, tensor: torch.Tensor) -> None:
        if tensor.dtype is not torch.int32:
            raise WeightsError(f"is {tensor.dtype}, expected torch.int32 with eight codes in each")
        copy_checked(self.tensor, tensor)


class GroupScalesPlace:
    """Keeps the scales of groups, [groups, rows], in the format of the checkpoint, which 16 bits must hold exactly. They may be
    negative: AutoRound's symmetric weights give the code 0 to the number of largest magnitude, whatever its sign."""

    num_parameters = 0

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.tensor = torch.empty(0, dtype=torch.float16, device=device)
        self.num_bytes = torch.int32.itemsize * shape[0] * shape[1]  # packed with zero points: `Int4Weight.scales_zeros`

    def load(self, tensor: torch.Tensor) -> None:
        if tensor.shape != self._shape:
            raise WeightsError(f"has shape {tuple(tensor.shape)}, expected {self._shape}: group_size says so")
        _finite_scales(tensor)
        try:
            ops.int4_scale_dtype(tensor)
        except ValueError as error:
            raise WeightsError(f"has {error}") from error
        self.tensor = tensor.to(self._device)


class OrderPlace:
    """Keeps the group of `group_size` that each column belongs to, when the checkpoint says so: [columns] integers."""

    num_parameters = 0
    num_bytes = 0

    def __init__(self, num_columns: int, group_size: int, device: torch.device) -> None:
        self._num_columns, self._group_size, self._device = num_columns, group_size, device
        self.tensor: torch.Tensor | None = None

    def load(self, tensor: torch.Tensor) -> None:
        if tensor.shape != (self._num_columns,) or tensor.is_floating_point():
            raise WeightsError(f"is {tensor.dtype} {tuple(tensor.shape)}, expected integers ({self._num_columns},)")
        num_groups = -(-self._num_columns // self._group_size)
        if int(tensor.min()) < 0 or int(tensor.max()) >= num_groups:
            raise WeightsError(f"names groups that do not exist: there are {num_groups}")
        if not torch.equal(tensor.long().sort().values, torch.arange(self._num_columns) // self._group_size):
            raise WeightsError(f"does not divide {self._num_columns} columns into groups of {self._group_size}")
        self.tensor = tensor.to(self._device)
