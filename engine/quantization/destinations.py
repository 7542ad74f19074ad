"""Destinations of the tensors of quantised checkpoints that are not plain matrices: scales, packed codes, column orders."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.errors import WeightsError
from engine.weights import Destination, copy_checked
from kernels import ops

NAN_BITS = 0x7F
"""The bits of NaN in e4m3 without the sign: the only code that is not a number."""

ORDER_DTYPES = (torch.int32, torch.int64)

CHECK_CHUNK_BYTES = 1 << 20
"""Checked at a time on a CPU, so that intermediate results stay in the second-level cache: five times faster."""


class ScaleDestination(Destination):
    """Fills `target`, [rows, 1] or [1] float32, from one number, or from one for each row. `is_divisor`: none may be zero."""

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
    numbers = finite_scales(tensor)
    if bool((numbers < 0).any()):
        raise WeightsError("holds negative scales")
    return numbers


def finite_scales(tensor: torch.Tensor) -> torch.Tensor:
    """In float32. Raises `WeightsError`, without the name of the tensor, unless all are finite."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        raise WeightsError(f"is {tensor.dtype}, expected a floating-point type of 16 bits or more")
    numbers = tensor.float()
    if not bool(numbers.isfinite().all()):
        raise WeightsError("holds scales that are not finite")
    return numbers


class Fp8CodesDestination(Destination):
    """Fills `target`, [rows, columns] float8_e4m3fn. The two codes that are no numbers are refused: products on CPUs read them
    as 480."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self.num_parameters = target.numel()
        self.num_bytes = target.nbytes

    def load(self, tensor: torch.Tensor) -> None:
        copy_checked(self._target, tensor)
        check_fp8_codes(tensor if self._target.is_meta else self._target)


def check_fp8_codes(codes: torch.Tensor) -> None:
    """codes: [rows, columns] float8_e4m3fn. Raises `WeightsError`, without the name of the tensor, for codes that are NaN."""
    num_rows = max(1, CHECK_CHUNK_BYTES // codes.shape[1]) if codes.device.type == "cpu" else codes.shape[0]
    if any(int(rows.bitwise_and(NAN_BITS).amax()) == NAN_BITS for rows in torch.split(codes.view(torch.uint8), num_rows)):
        raise WeightsError("holds codes that are no numbers (NaN)")


class Int8CodesDestination(Destination):
    """Fills `target`, [rows, columns] int8: from codes as they are, or, if they are `packed`, from words that hold four of them
    along the columns, offset by 128."""

    def __init__(self, target: torch.Tensor, *, packed: bool) -> None:
        self._target, self._packed = target, packed
        self.num_parameters = target.numel()
        self.num_bytes = target.nbytes

    def load(self, tensor: torch.Tensor) -> None:
        if not self._packed:
            copy_checked(self._target, tensor)
            return
        rows, columns = self._target.shape
        words = _checked_words(tensor, (rows, -(-columns // 4)), 8)
        self._target.copy_(words.contiguous().view(torch.uint8)[:, :columns].bitwise_xor(0x80).view(torch.int8))


class CodesDestination(Destination):
    """Keeps words of codes of `bits` bits as they are. `are_parameters`: else they are zero points, whose bytes count with
    those of their scales."""

    def __init__(self, shape: tuple[int, int], bits: int, device: torch.device, *, are_parameters: bool) -> None:
        self._shape, self._bits, self._device = shape, bits, device
        self.tensor = torch.empty(0, dtype=torch.int32, device=device)
        num_words = shape[0] * shape[1]
        self.num_parameters = num_words * 32 // bits if are_parameters else 0
        self.num_bytes = num_words * torch.int32.itemsize if are_parameters else 0

    def load(self, tensor: torch.Tensor) -> None:
        self.tensor = _checked_words(tensor, self._shape, self._bits).to(self._device)


def _checked_words(tensor: torch.Tensor, shape: tuple[int, int], bits: int) -> torch.Tensor:
    if tensor.dtype is not torch.int32:
        number = {4: "eight", 8: "four"}[bits]
        raise WeightsError(f"is {tensor.dtype}, expected torch.int32 with {number} codes in each")
    if tensor.shape != shape:
        raise WeightsError(f"has shape {tuple(tensor.shape)}, expected {shape} by config.json")
    return tensor


class GroupScalesDestination(Destination):
    """Keeps the scales of groups, of `shape`, in the format of the checkpoint, which 16 bits must hold exactly if they are
    `packed` with their zero points. They may be negative: AutoRound's symmetric weights give the code 0 to the number of
    largest magnitude, whatever its sign."""

    def __init__(self, shape: tuple[int, int], device: torch.device, *, packed: bool) -> None:
        self._shape, self._device, self._packed = shape, device, packed
        self.tensor = torch.empty(0, dtype=torch.float16, device=device)
        self.num_bytes = torch.int32.itemsize * shape[0] * shape[1]  # with their zero points: `Int4Weight.scales_zeros`

    def load(self, tensor: torch.Tensor) -> None:
        if tensor.shape != self._shape:
            raise WeightsError(f"has shape {tuple(tensor.shape)}, expected {self._shape} by group_size")
        finite_scales(tensor)
        try:
            if self._packed:
                ops.int4_scale_dtype(tensor)
        except ValueError as error:
            raise WeightsError(f"has {error}") from error
        self.tensor = tensor.to(self._device)


class BufferDestination(Destination):
    """Keeps a tensor of `shape` and the kind of `dtype` until it is decoded. `check` raises `WeightsError` for invalid
    numbers."""

    def __init__(
        self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, check: Callable[[torch.Tensor], object]
    ) -> None:
        self._expected, self._device, self._check = torch.empty(shape, dtype=dtype, device="meta"), device, check
        self.tensor = torch.empty(0, dtype=dtype, device=device)

    def load(self, tensor: torch.Tensor) -> None:
        copy_checked(self._expected, tensor)  # raises, naming what is wrong
        self._check(tensor)
        self.tensor = tensor.to(self._device)

    def release(self) -> None:
        self.tensor = self.tensor.new_empty(0)


class ShapeDestination(Destination):
    """Checks the [2] integers that state the shape of a packed matrix."""

    def __init__(self, rows: int, columns: int) -> None:
        self._shape = [rows, columns]

    def load(self, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() or tensor.flatten().tolist() != self._shape:
            raise WeightsError(f"is {tensor.flatten()[:4].tolist()}, expected {self._shape} by config.json")


class IgnoredDestination(Destination):
    """Ignores a tensor that belongs to a matrix: scales of inputs that are not rounded."""

    def load(self, tensor: torch.Tensor) -> None:
        """Accepts any tensor."""


class OrderDestination(Destination):
    """Keeps the group of `group_size` that each column belongs to, when the checkpoint says so: [columns] int32 or int64."""

    def __init__(self, num_columns: int, group_size: int, device: torch.device) -> None:
        self._num_columns, self._group_size, self._device = num_columns, group_size, device
        self.tensor: torch.Tensor | None = None

    def load(self, tensor: torch.Tensor) -> None:
        if tensor.shape != (self._num_columns,) or tensor.dtype not in ORDER_DTYPES:
            raise WeightsError(f"is {tensor.dtype} {tuple(tensor.shape)}, expected int32 or int64 ({self._num_columns},)")
        num_groups = -(-self._num_columns // self._group_size)
        if int(tensor.min()) < 0 or int(tensor.max()) >= num_groups:
            raise WeightsError(f"names groups that do not exist: there are {num_groups}")
        if not torch.equal(tensor.long().sort().values, torch.arange(self._num_columns) // self._group_size):
            raise WeightsError(f"does not divide {self._num_columns} columns into groups of {self._group_size}")
        self.tensor = tensor.to(self._device)
