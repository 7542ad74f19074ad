"""The sizes that steps over slots are padded to, and how many captured steps are kept for them. Knows no torch.

    usual kinds   1, 2, 4, 8, 16, 24 … 256 │ 272, 288 … 512 │ 544, 576 … 1024 │ …
    all others    1, 2, 4, 8, 16, 32, 64, 96 … 256 │ 320, 384 … 512 │ 640, 768 … 1024 │ …
    verification  2, 4, 8, 16, 32, 64 …
    with chunks   16, 32, 64, 128, 192, 256 │ 320, 384 … 512 │ 640, 768 … 1024 │ …; choosing their tokens as "all others"

A row of padding costs its part of the products and nothing else. From 128 rows on, padding makes steps of the usual kinds,
greedy and sampled, at most a sixteenth longer. A step without a graph of its own uses one that ends with the logits; these have
few sizes, so that all of them are kept. Steps with chunks of prompts are captured at the start, in all sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

EVERY = 8
COARSE_EVERY = 32
FINE_ROWS = 256

USUAL_KINDS = 2
RARE_KEPT = 8
"""Captured steps of other kinds that are kept: those that weigh the vocabulary, count penalties or score tokens."""

CHUNK_ROWS_FEW = (16, 32, 64, 128, 192, 256)
"""Rows of captured steps with chunks, in the range where reading the weights takes longer than multiplying with them, so that
padding is free."""

CHUNK_ROWS_EVERY = 64
"""The largest captured step with chunks has a multiple of this, where memory limits it."""

CHUNKS_FEW, CHUNKS_MANY = 3, 31
"""The most chunks of such a step. With few chunks attention splits the keys more finely, which matters to steps of few rows."""

CHUNK_ROWS_BYTES_MAX = 128 << 20
"""The most activations of a captured step with chunks: 960 rows of Llama-3.1-8B, 4,352 of Qwen3-0.6B. A longer step keeps a
card busy for about as long as the host takes to launch its kernels one by one, and all graphs share the memory of the
largest."""

RECORDED_ROWS_MAX = 64
"""The most rows of a recorded step on a CPU. More rows compute for so long that the calls of operations do not matter."""


def step_size(num_rows: int, max_rows: int, *, every: int = EVERY) -> int:
    """The rows that a step is padded to, at most `max_rows`: powers of two up to `every`, its multiples up to 256, and from
    there on as many sizes for each doubling as there are between 128 and 256."""
    if num_rows <= every:
        size = _power_of_two(num_rows)
    else:
        if num_rows > FINE_ROWS:
            every <<= ((num_rows - 1) // FINE_ROWS).bit_length()
        size = -(-num_rows // every) * every
    return min(size, max_rows)


def logits_size(num_rows: int, max_rows: int) -> int:
    """The rows that a step which ends with its logits is padded to."""
    return step_size(num_rows, max_rows, every=COARSE_EVERY)


def verify_size(num_rows: int, max_rows: int) -> int:
    """The rows that a verification step is padded to: powers of two, because the number differs from step to step."""
    return min(_power_of_two(num_rows), max_rows)


@functools.cache
def chunk_shapes(max_rows: int) -> tuple[tuple[int, int], ...]:
    """Rows and chunks of the captured steps with chunks, up to `max_rows`; a step uses one that has enough of both."""
    if max_rows < CHUNK_ROWS_FEW[0]:
        return ()
    few = sorted({min(rows, max_rows) for rows in CHUNK_ROWS_FEW})
    more = sorted({logits_size(rows, max_rows) for rows in range(few[-1] + 1, max_rows + 1)})
    shapes = [(rows, chunks) for rows in few for chunks in (CHUNKS_FEW, CHUNKS_MANY)]
    return tuple(shapes + [(rows, CHUNKS_MANY) for rows in more])


def sampled_shapes(max_rows: int) -> list[tuple[int, bool]]:
    """(rows, whether the whole vocabulary is weighed) of the graphs that choose the tokens of captured steps with chunks, in
    which at most `max_rows` sample."""
    return [(size, weighs) for size in sizes(logits_size, max_rows) for weighs in (False, True)]


def chunk_rows_max(max_tokens: int, row_bytes: int) -> int:
    """Rows of the largest captured step with chunks, 0 if none is captured: `max_tokens`, the most that a step has, or as many
    as there is memory for. `row_bytes`: activations of one row in the layer that holds most."""
    most = CHUNK_ROWS_BYTES_MAX // row_bytes // CHUNK_ROWS_EVERY * CHUNK_ROWS_EVERY
    return max((rows for rows, _ in chunk_shapes(min(max_tokens, most))), default=0)


def graphs_kept(max_num_seqs: int, max_draft_tokens: int, *, chunk_rows: int = 0, fewest: int = 1) -> int:
    """Captured steps of the target that are kept at a time: decodes, and steps with chunks of up to `chunk_rows` rows; of all
    these, those of `fewest` rows or more."""
    chunks = sum(rows >= fewest for rows, _ in chunk_shapes(chunk_rows))
    return decode_graphs_kept(max_num_seqs, max_draft_tokens, fewest=fewest) + chunks


def decode_graphs_kept(max_num_seqs: int, max_draft_tokens: int, *, fewest: int = 1) -> int:
    """Captured decode steps of the target that are kept at a time: every size of the usual kinds, every size of those that end
    with the logits, and some more. `max_draft_tokens`: rows of a step beyond one for each request."""
    usual, logits = (len(sizes(size, max_num_seqs, fewest=fewest)) for size in (step_size, logits_size))
    verification = sizes(verify_size, max_num_seqs + max_draft_tokens, fewest=max(2, fewest)) if max_draft_tokens else []
    rare = RARE_KEPT if max_num_seqs >= fewest else 0
    return USUAL_KINDS * (usual + len(verification)) + logits + rare


def draft_graphs_kept(max_num_seqs: int) -> int:
    """Captured steps of a draft model by itself, which are kept beside the target's."""
    return USUAL_KINDS * len(sizes(step_size, max_num_seqs))


def sizes(size: Callable[[int, int], int], max_rows: int, *, fewest: int = 1) -> list[int]:
    """All sizes to which `size` pads steps of `fewest` to `max_rows` rows, in ascending order."""
    return sorted({size(number, max_rows) for number in range(fewest, max_rows + 1)})


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
