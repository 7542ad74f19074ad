"""Where the steps of a device leave their tokens for the host."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HostTokens(NamedTuple):
    """Places in page-locked memory of the host, which kernels write to, taken in turn.

    places: [D, 1 + B] int64, D at least 1: the number of a step, and its tokens. num_steps: [1] int64, on the device: how many
    steps have left tokens. Step n is the n-th of them, counted from 1, and leaves its own in places[n mod D]. Only a launch
    counts, so that a captured one goes on counting when it is replayed.
    """

    places: torch.Tensor
    num_steps: torch.Tensor
