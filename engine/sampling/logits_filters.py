"""Which tokens a request draws from, in the form that kernels take.

Order, as in `transformers`: top-k, top-p (arXiv 1904.09751) on what top-k left, min-p (arXiv 2407.01082), and typical
sampling (arXiv 2202.00666) on what these left. All of them work on probabilities after temperature.
"""

from __future__ import annotations

import math

from engine.protocol import SamplingParams

GREEDY_BELOW = 1e-5
"""Lower temperatures are greedy: float32 cannot hold the smallest of them, and all of them draw the largest logit anyway."""

LOG2_E = 1.4426950408889634


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the largest logit is taken (lowest id on ties); also when the filters leave a single candidate."""
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


def scale_of(sampling: SamplingParams) -> float:
    """The factor by which logits become binary orders of probability; 0 is greedy."""
    return 0.0 if is_greedy(sampling) else LOG2_E / sampling.temperature


def neg_log2_min_p_of(sampling: SamplingParams) -> float:
    """−log2(min_p): min-p keeps tokens at most this many binary orders below the likeliest one; inf is off."""
    return -math.log2(sampling.min_p) if sampling.min_p > 0.0 else math.inf


def is_filtered(sampling: SamplingParams) -> bool:
    """Whether any token is left out before one is drawn."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.typical_p < 1.0
