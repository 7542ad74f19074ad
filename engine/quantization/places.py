"""Places for the tensors of quantised checkpoints that are no plain matrices: scales, codes in words, orders of columns."""

from __future__ import annotations

import torch

from engine.errors import WeightsError
from engine.runner.weights import copy_checked


class ScalePlace:
    """Fills `target`, [rows, 1] or [1] float32, from one number, or from one for each row."""

    num_parameters = 0

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self.num_bytes = target.numel() * target.element_size()

    def take(self, tensor: torch.Tensor) -> None:
        rows = self._target.shape[0]
        if tensor.numel() not in (1, rows) or tensor.dim() > 2 or (tensor.numel() > 1 and tensor.shape[0] != rows):
            one_each = "" if rows == 1 else f" or [{rows}, 1]"
            raise WeightsError(f"has shape {tuple(tensor.shape)}, expected one number{one_each}; blocks are not supported")
        numbers = checked_scales(tensor)
        self._target.copy_(numbers.reshape(-1, *[1] * (self._target.dim() - 1)))


def checked_scales(tensor: torch.Tensor) -> torch.Tensor:
    """In float32. Raises `WeightsError`, without the name of the tensor, unless all are finite and none is negative."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        raise WeightsError(f"is {tensor.dtype}, expected a floating-point type")
    numbers = tensor.float()
    if not bool(numbers.isfinite().all()) or bool((numbers < 0).any()):
        raise WeightsError("holds scales that are negative or not finite")
    return numbers


class CodesPlace:
    """Keeps words of codes as they are; the codes are parameters where `counts` says so."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, *, counts: bool) -> None:
        self.tensor = torch.empty(shape, dtype=torch.int32, device=device)
        self.num_parameters = self.tensor.numel() * 8 if counts else 0
        self.num_bytes = self.tensor.numel() * self.tensor.element_size()

    def take(self, tensor: torch.Tensor) -> None:
        if tensor.dtype is not torch.int32:
            raise WeightsError(f"is {tensor.dtype}, expected torch.int32 with eight codes in each")
        copy_checked(self.tensor, tensor)


class GroupScalesPlace:
    """Keeps the scales of groups, [groups, rows], in the format of the checkpoint."""

    num_parameters = 0

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.tensor = torch.empty(0, dtype=torch.float16, device=device)
        self.num_bytes = 2 * shape[0] * shape[1]

    def take(self, tensor: torch.Tensor) -> None:
        if tensor.shape != self._shape:
            raise WeightsError(f"has shape {tuple(tensor.shape)}, expected {self._shape}: group_size says so")
        checked_scales(tensor)
        self.tensor = tensor.to(self._device)


class OrderPlace:
    """Keeps to which group each column belongs, when the checkpoint says so: [columns] integers below `num_groups`."""

    num_parameters = 0
    num_bytes = 0

    def __init__(self, num_columns: int, num_groups: int, device: torch.device) -> None:
        self._num_columns, self._num_groups, self._device = num_columns, num_groups, device
        self.tensor: torch.Tensor | None = None

    def take(self, tensor: torch.Tensor) -> None:
        if tensor.shape != (self._num_columns,) or tensor.is_floating_point():
            raise WeightsError(f"is {tensor.dtype} {tuple(tensor.shape)}, expected integers ({self._num_columns},)")
        if int(tensor.min()) < 0 or int(tensor.max()) >= self._num_groups:
            raise WeightsError(f"names groups that do not exist: there are {self._num_groups}")
        self.tensor = tensor.to(self._device)
