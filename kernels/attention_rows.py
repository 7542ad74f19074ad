"""What attention is asked to compute in one step, in integers: the common input of every implementation. Knows no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes that stay the same for the life of an engine. `sliding_window` counts visible tokens, the query's own included."""

    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """`query_len` consecutive queries of one request. The last one sees `context_len` tokens, itself included."""

    block_table: Sequence[int]
    query_len: int
    context_len: int

    @property
    def start(self) -> int:
        """Position of the first query."""
        return self.context_len - self.query_len
