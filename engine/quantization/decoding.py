"""Matrices in forms that no product reads, decoded while a checkpoint is read: each as soon as its last tensor is there."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Protocol

import torch

from engine.config.stored_weights import DecodedWeights, Fp8BlockWeights
from engine.quantization.checkpoint import CheckpointNames
from engine.quantization.destinations import BufferDestination, check_fp8_codes, checked_scales
from engine.quantization.group_tensors import GroupTensors
from engine.weights import Destination, WeightPlan

Decode = Callable[[torch.Tensor], None]
"""Writes the numbers of a matrix into a tensor of its shape."""


class EncodedMatrix(Protocol):
    """The tensors of one matrix, held until all of them are read."""

    @property
    def optional(self) -> tuple[str, ...]: ...

    def destinations(self) -> dict[str, Destination]: ...

    def decode_into(self, target: torch.Tensor) -> None: ...

    def release(self) -> None: ...


class DecodedCheckpoint:
    """A checkpoint whose quantised matrices are decoded. `names` are those of the tensors in its files."""

    def __init__(self, weights: DecodedWeights, names: Set[str]) -> None:
        self._weights = weights
        self.names = CheckpointNames(names, weights.marker)

    def matrix(self, module: str, rows: int, columns: int, device: torch.device) -> EncodedMatrix:
        """A quantised matrix of this checkpoint. Raises `WeightsError` for sizes that its form cannot have."""
        if isinstance(self._weights, Fp8BlockWeights):
            return Fp8BlockMatrix(rows, columns, self._weights, device=device)
        return GroupTensors(module, rows, columns, self._weights, device=device)


class Fp8BlockMatrix:
    """[rows, columns] in E4M3 with a scale for each block: `weight` and `weight_scale_inv` or `weight_scale`, which is
    [⌈rows / block rows⌉, ⌈columns / block columns⌉]. Blocks at the edges may be smaller."""

    optional = ()

    def __init__(self, rows: int, columns: int, stored: Fp8BlockWeights, *, device: torch.device) -> None:
        self._stored = stored
        height, width = stored.block
        scales_shape = -(-rows // height), -(-columns // width)
        self._codes = BufferDestination((rows, columns), torch.float8_e4m3fn, device, check_fp8_codes)
        self._scales = BufferDestination(scales_shape, torch.float32, device, checked_scales)

    def destinations(self) -> dict[str, Destination]:
        return {"weight": self._codes, self._stored.marker: self._scales}

    def decode_into(self, target: torch.Tensor) -> None:
        height, width = self._stored.block
        codes, scales = self._codes.tensor, self._scales.tensor.float()
        for index, first in enumerate(range(0, codes.shape[0], height)):
            of_columns = scales[index].repeat_interleave(width)[: codes.shape[1]]
            target[first : first + height] = codes[first : first + height].float() * of_columns

    def release(self) -> None:
        self._codes.release()
        self._scales.release()


class DecodedRows:
    """One matrix among those of a fused module: hands `fill` its decoding when the last of its tensors was read.
    `num_bytes`: what its numbers will take."""

    def __init__(self, encoded: EncodedMatrix, num_parameters: int, num_bytes: int, fill: Callable[[Decode], None]) -> None:
        self._encoded, self._fill = encoded, fill
        self._num_parameters, self._num_bytes = num_parameters, num_bytes
        self._num_unread = 0

    def plan(self, plan: WeightPlan, module: str, names: CheckpointNames) -> None:
        """Tensors that a checkpoint may leave out are waited for if `names` has them."""
        sizes = self._num_parameters, self._num_bytes
        for last, destination in self._encoded.destinations().items():
            if last not in self._encoded.optional or names.has(module, last):
                plan.add(f"{module}.{last}", _Part(self, destination, *sizes))
                self._num_unread += 1
                sizes = 0, 0  # the first tensor counts for all

    def load(self, destination: Destination, tensor: torch.Tensor) -> None:
        destination.load(tensor)
        self._num_unread -= 1
        if not self._num_unread:
            self._fill(self._encoded.decode_into)
            self._encoded.release()


class _Part(Destination):
    def __init__(self, matrix: DecodedRows, destination: Destination, num_parameters: int, num_bytes: int) -> None:
        self._matrix, self._destination = matrix, destination
        self.num_parameters, self.num_bytes = num_parameters, num_bytes

    def load(self, tensor: torch.Tensor) -> None:
        self._matrix.load(self._destination, tensor)
