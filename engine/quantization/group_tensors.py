"""The tensors of one matrix whose codes share words and have a scale and a zero point for each group of inputs."""

from __future__ import annotations

import torch

from engine.config.stored_weights import GroupLayout, GroupWeights
from engine.errors import WeightsError
from engine.quantization.destinations import CodesDestination, GroupScalesDestination, OrderDestination, ShapeDestination
from engine.weights import Destination

WORD_BITS = 32
NAMES = {
    GroupLayout.AWQ: ("qweight", "qzeros", "scales", "g_idx"),
    GroupLayout.GPTQ: ("qweight", "qzeros", "scales", "g_idx"),
    GroupLayout.COMPRESSED: ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx"),
}
"""The last parts of the names of codes, zero points, scales and the group of each column."""

ROWS_DECODED = 1024
"""Rows decoded at a time, so that intermediate results stay small."""


class GroupTensors:
    """[rows, columns] as (code - zero) · scale. When all are read, `codes` [K / c, N] int32, `zeros` [G, ⌈N / c⌉] int32,
    `scales` [G, N] and `order` [K] or None are in GPTQ's layout, c codes in each word; those of AWQ in its own, with `codes`
    [K, N / c].

    compressed-tensors stores the same words with rows and columns exchanged. Raises `WeightsError`, naming the module,
    for sizes whose codes do not fill their words.
    """

    def __init__(self, module: str, rows: int, columns: int, stored: GroupWeights, *, device: torch.device) -> None:
        self._shape, self._stored, self._device = (rows, columns), stored, device
        codes_per_word = WORD_BITS // stored.bits
        size = rows if stored.layout is GroupLayout.AWQ else columns
        if size % codes_per_word or (stored.bits == 4 and rows % codes_per_word):
            raise WeightsError(
                f"{module} has {rows} outputs and {columns} inputs: with {stored.bits} bits, multiples of {codes_per_word} are "
                "supported"
            )
        num_groups = 1 if stored.group_size is None else -(-columns // stored.group_size)
        self._zeros_shape = (num_groups, -(-rows // codes_per_word))
        words, scales_shape = (columns // codes_per_word, rows), (num_groups, rows)
        if stored.layout is GroupLayout.AWQ:
            words = (columns, rows // codes_per_word)
        self._codes = CodesDestination(self._stored_shape(words), stored.bits, device, are_parameters=True)
        self._zeros = CodesDestination(self._stored_shape(self._zeros_shape), stored.bits, device, are_parameters=False)
        self._scales = GroupScalesDestination(self._stored_shape(scales_shape), device, packed=stored.bits == 4)
        self._order = OrderDestination(columns, stored.group_size or columns, device)

    @property
    def _is_transposed(self) -> bool:
        return self._stored.layout is GroupLayout.COMPRESSED

    def _stored_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return (shape[1], shape[0]) if self._is_transposed else shape

    def destinations(self) -> dict[str, Destination]:
        """The destinations of the tensors, by the last part of their names."""
        codes, zeros, scales, order = NAMES[self._stored.layout]
        found: dict[str, Destination] = {codes: self._codes, scales: self._scales}
        if self._stored.has_zeros:
            found[zeros] = self._zeros
        if self._stored.layout is not GroupLayout.AWQ:
            found[order] = self._order
        if self._is_transposed:
            found["weight_shape"] = ShapeDestination(*self._shape)
        return found

    @property
    def optional(self) -> tuple[str, ...]:
        """Names among `destinations` that a checkpoint may leave out."""
        return () if self._stored.needs_order else (NAMES[self._stored.layout][3],)

    @property
    def codes(self) -> torch.Tensor:
        return self._oriented(self._codes.tensor)

    @property
    def zeros(self) -> torch.Tensor:
        """Those of symmetric codes are not stored: half the range."""
        if self._stored.has_zeros:
            return self._oriented(self._zeros.tensor)
        bits = self._stored.bits
        word = sum(1 << first + bits - 1 for first in range(0, WORD_BITS, bits)) - (1 << WORD_BITS)
        return torch.full(self._zeros_shape, word, dtype=torch.int32, device=self._device)

    @property
    def scales(self) -> torch.Tensor:
        return self._oriented(self._scales.tensor)

    @property
    def order(self) -> torch.Tensor | None:
        return self._order.tensor

    def _oriented(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.T if self._is_transposed else tensor

    def release(self) -> None:
        """Drop everything that was read."""
        self._codes.tensor = self._zeros.tensor = self._scales.tensor = torch.empty(0)
        self._order.tensor = None

    def decode_into(self, target: torch.Tensor) -> None:
        """target: [rows, columns], gets the numbers that 8-bit codes stand for, computed in float32."""
        rows, columns = self._shape
        codes = self.codes.T.contiguous().view(torch.uint8)
        zeros = self.zeros.contiguous().view(torch.uint8).T[:rows].float() + self._stored.zero_offset
        scales = self.scales.T.float()
        groups = self.order
        if groups is None:
            groups = torch.arange(columns, device=self._device) // (self._stored.group_size or columns)
        for first in range(0, rows, ROWS_DECODED):
            some = slice(first, first + ROWS_DECODED)
            steps = codes[some].float().sub_(zeros[some].index_select(1, groups))
            target[some] = steps.mul_(scales[some].index_select(1, groups))
