"""Sampling for `table`: the CPU implementation as one launch, because it depends on values."""

from __future__ import annotations

from typing import Any

import torch

from kernels.cpu import sampling
from tests.support.rehearsal.table import launch_with_output

sampling_workspace = sampling.sampling_workspace


def _tokens(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


sample = launch_with_output(sampling.sample, _tokens)
