"""The scales by which one layer's keys and values are divided in a cache of 8 bits: from the checkpoint, else one."""

from __future__ import annotations

import torch

from engine.errors import WeightsError
from engine.quantization.destinations import checked_scales
from engine.weights import Destination, WeightPlan

NAMES = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("k_proj.output_scale", "v_proj.output_scale"),
)
"""Their names in checkpoints of llm-compressor, vLLM, ModelOpt and AutoFP8, below the name of the attention."""


class KvScales:
    """`values`: [2] float32, of keys and of values; a cache of 8 bits holds value / scale. `stored`: those of the two that
    the checkpoint has."""

    def __init__(self, device: torch.device) -> None:
        self.values = torch.ones(2, dtype=torch.float32, device=device)
        self.stored: list[float | None] = [None, None]

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        """A checkpoint may hold them under any of the names, or not at all."""
        for pair in NAMES:
            for index, name in enumerate(pair):
                plan.add(f"{prefix}.{name}", _KvScaleDestination(self, (index,)), optional=True)
        plan.add(f"{prefix}.kv_scale", _KvScaleDestination(self, (0, 1)), optional=True)

    def set(self, index: int, scale: float) -> None:
        """Raises `WeightsError` if the checkpoint has another one under another name."""
        if self.stored[index] not in (None, scale):
            raise WeightsError(f"is {scale:g}, but under another name it is {self.stored[index]:g}")
        self.values[index] = self.stored[index] = scale


class _KvScaleDestination(Destination):
    def __init__(self, scales: KvScales, indices: tuple[int, ...]) -> None:
        self._scales, self._indices = scales, indices

    def load(self, tensor: torch.Tensor) -> None:
        if tensor.numel() != 1:
            raise WeightsError(f"has shape {tuple(tensor.shape)}, expected one number for all heads")
        number = float(checked_scales(tensor))
        if not number:
            raise WeightsError("is zero")
        for index in self._indices:
            self._scales.set(index, number)
