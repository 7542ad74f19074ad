"""Where a device's steps write their tokens for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HostTokens(NamedTuple):
    """Places in page-locked host memory, to which kernels write in rotation.

    places: [D, 1 + B] int64, D at least 1: the number of a step, and its tokens. num_steps: [1] int64, on the device: how many
    steps have written tokens. Step n, counted from 1, writes its tokens to places[n mod D]. The kernel does the counting, so a
    captured step goes on counting when it is replayed.
    """

    places: torch.Tensor
    num_steps: torch.Tensor
