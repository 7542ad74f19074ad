"""The inputs of a forward pass that all layers share: positions, slot mapping, attention plans."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.layers.rotary import Rotation
from kernels.ops import AnyPlan


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The inputs of one forward pass of a decoder or an encoder."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    rotations: tuple[Rotation, ...]  # one for each of the model's `ropes`
    slot_mapping: torch.Tensor  # [T] int64: block · P + offset, below 0 for padding; [0] without a cache
    sampled_rows: torch.Tensor | None  # [R] int64: indices of the hidden states to return; None is all, in order
    attention: tuple[AnyPlan, ...]  # one for each of the model's `windows`
