"""The operations of batch-invariant engines on NVIDIA GPUs: those of kernels/triton/table.py, with replacements
for those that depend on the batch (products, attention, fused products, the heads of greedy steps).

Norms, rotation, activations, embedding and log-probabilities are already computed row by row. A mixture's experts are
multiplied together in tiles of one size; those that `bind_experts` cannot read are multiplied one by one, as in any engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kernels.fusible_products import HasWeight
from kernels.operations import LinearKernel
from kernels.quantised_linear import Fp8Rows
from kernels.quantised_weights import Int4Weight
from kernels.triton.experts.mixture import bind_experts
from kernels.triton.invariant.attention import decode_workspace, paged_decode, paged_prefill
from kernels.triton.invariant.int4 import invariant_int4
from kernels.triton.invariant.linear import invariant_linear
from kernels.triton.table import OPERATIONS as BY_BATCH


class InvariantProduct:
    """[T, K] → [T, N], with a row's bits independent of the batch. It exposes its weight for the experts of a mixture, but is
    not a `FusibleProduct`, because fused operations sum in another order."""

    def __init__(
        self, weight: Any, bias: torch.Tensor | None, rounded: Callable[[torch.Tensor], Fp8Rows] | None = None
    ) -> None:
        self.weight, self.bias, self._rounded = weight, bias, rounded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, Int4Weight):
            return invariant_int4(x, self.weight, bias=self.bias)
        if self._rounded is not None:
            rows, scales, dtype = self._rounded(x)
            return invariant_linear(rows, self.weight, x_scales=scales, out_dtype=dtype, bias=self.bias)
        return invariant_linear(x, self.weight, bias=self.bias)


def row_invariant(multiply: Any) -> LinearKernel:
    """→ the batch-invariant form of `multiply`, a product of that table, [T, K] → [T, N]. Raises TypeError if it does not
    expose its weight."""
    if not isinstance(multiply, HasWeight) or multiply.weight is None:
        raise TypeError(f"{type(multiply).__name__} exposes no weight for a batch-invariant product")
    return InvariantProduct(multiply.weight, multiply.bias, getattr(multiply, "rounded", None))


ROWS = 64
"""Rows of the tile for an expert's tokens, whatever their number: the same as for all products here."""

OPERATIONS = replace(
    BY_BATCH,
    description="Triton kernels, every row in tiles of its own order",
    bind_experts=partial(bind_experts, tokens_per_expert=ROWS),
    pack_linear=InvariantProduct,
    linear_add=None,
    normed_linear=None,
    paged_decode=paged_decode,
    rotated_decode=None,
    paged_prefill=paged_prefill,
    decode_workspace=decode_workspace,
    max_verify_group=lambda *_: 1,
    bind_greedy_head=None,
    is_row_invariant=True,
    row_invariant=row_invariant,
)
