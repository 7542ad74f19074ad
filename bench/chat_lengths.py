"""Lengths of conversations in tokens: percentiles of a ShareGPT sample, and draws from the distribution through them."""

from __future__ import annotations

import random
from collections.abc import Sequence

PERCENTILES = (0, 10, 25, 50, 75, 90, 97)
PROMPT_LENS = (4, 9, 15, 36, 163, 842, 1800)
OUTPUT_LENS = (8, 39, 134, 281, 450, 685, 860)
"""The length at each percentile."""


def draw_length(rng: random.Random, lens: Sequence[int]) -> float:
    """Draw a length, not rounded, from the piecewise linear distribution through `lens` at the percentiles."""
    rank = rng.uniform(0, PERCENTILES[-1])
    upper = next(i for i, percentile in enumerate(PERCENTILES) if rank <= percentile and i)
    low, high = PERCENTILES[upper - 1], PERCENTILES[upper]
    return lens[upper - 1] + (lens[upper] - lens[upper - 1]) * (rank - low) / (high - low)
