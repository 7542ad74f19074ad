"""The rows of attention in one step, in integers: the common input of all implementations. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of attention for the life of an engine. `sliding_window` counts visible tokens, the query's own included.

    `scale` multiplies the products of queries and keys; None is √(1 / head_dim). `softcap` bounds them smoothly: c · tanh(x /
    c) (arXiv 2408.00118). Without `causal` every query sees its whole text.
    """

    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    causal: bool = True

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def product_scale(self) -> float:
        """The factor for products of queries and keys."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


class AttentionRow(NamedTuple):
    """`query_len` consecutive queries of one request. The last one sees `context_len` tokens, itself included."""

    block_table: Sequence[int]
    query_len: int
    context_len: int

    @property
    def start(self) -> int:
        """Position of the first query."""
        return self.context_len - self.query_len
