"""Into how many splits attention divides the keys, and how much memory their partial results take. These are the numbers of
`kernels.triton`, needed here without torch; tests compare both."""

from __future__ import annotations

CHUNK_CONTEXT_MIN, CHUNK_PARTS_MAX = 2048, 1 << 16
"""Chunks of prompts (`kernels.triton.attention.chunk_splits`): the shortest context whose keys are split, and the most partial
results of a step, one for each split, query and head."""

FEW_QUERIES_MAX = 8
FEW_QUERIES_BYTES_MAX = 256 << 20
"""Chunks that are attended by the decode kernel (`kernels.triton.attention.prefill`): the most tokens of one, and the most
bytes of their partial results, if they have more rows than the workspace of decodes."""

INVARIANT_SPLIT = 256
INVARIANT_QUERIES_MIN = 64
INVARIANT_BYTES_MAX = 256 << 20
"""Batch-invariant attention (`kernels.triton.invariant.attention`): tokens of a split, the fewest queries that there is room
for, and the most bytes of all partial results of a step."""


def num_splits(num_tokens: int, head_dim: int, kv_element_bytes: int, window: int | None) -> int:
    """The most splits that the keys of one decode are cut into (`kernels.triton.attention.splits`): they are of 128 tokens for
    heads of 128 numbers in 16 bits, eight times that in long requests. A window sees no more of a long one than itself."""
    row_bytes = (1 << (head_dim - 1).bit_length()) * kv_element_bytes
    split = max(64, 32768 // row_bytes)
    if window is not None:
        num_tokens = min(num_tokens, window + split)
    shortest, doubled, fourfold, eightfold = (-(-num_tokens // (factor * split)) for factor in (1, 2, 4, 8))
    return max(1, min(4, shortest), min(8, doubled), min(32, fourfold), eightfold)


def invariant_bytes(num_seqs: int, num_tokens: int, num_heads: int, head_dim: int, window: int | None) -> int:
    """What the splits of `num_seqs` decodes of up to `num_tokens` tokens take; nothing where keys are not divided."""
    splits = -(-num_tokens // INVARIANT_SPLIT)
    if window is not None:
        splits = min(splits, (window + 129) // INVARIANT_SPLIT + 2)
    if splits <= 1:
        return 0
    partial_bytes = (head_dim + 2) * 4
    num_partials = min(max(num_seqs, INVARIANT_QUERIES_MIN) * num_heads * splits, INVARIANT_BYTES_MAX // partial_bytes)
    return max(num_heads * splits, num_partials) * partial_bytes
