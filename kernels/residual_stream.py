"""The residual stream between two fused products, in the form in which one hands it to the next."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Gate = Literal["silu", "gelu_tanh"]


class Stream(NamedTuple):
    """Rows of the residual stream with the sums of their RMS normalisation, which the next product applies.

    total: [M, d]; weighted: [M, d], total times the weight of the coming norm; squares: [C, M] float32, whose sum over C is
    that of a row's squares.
    """

    total: torch.Tensor
    weighted: torch.Tensor
    squares: torch.Tensor
