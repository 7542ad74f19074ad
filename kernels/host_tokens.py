"""The memory in which the steps of a device leave their tokens for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HostTokens(NamedTuple):
    """A ring buffer in page-locked host memory, to which kernels write.

    places: [D, 1 + B] int64, D at least 1: entries, each with the number of a step and its tokens. num_steps: [1] int64, on the
    device: how many steps have written tokens. Step n, counted from 1, writes its tokens to places[n mod D]. The kernel
    counts the steps, so the count continues when a captured step is replayed.
    """

    places: torch.Tensor
    num_steps: torch.Tensor
