"""The residual stream between two fused products, in the form in which one passes it to the next."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Gate = Literal["silu", "gelu_tanh"]


class Stream(NamedTuple):
    """Rows of the residual stream with the sums of squares of their RMS normalisation, which the next product applies.

    total: [M, d]; weighted: [M, d], total times the weight of the coming norm; squares: [C, M] float32, whose sum over C is
    the sum of squares of a row.
    """

    total: torch.Tensor
    weighted: torch.Tensor
    squares: torch.Tensor
