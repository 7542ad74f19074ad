"""What a request says of the tokens that one is drawn from, as kernels take it.

Order, as in `transformers`: top-k, top-p (arXiv 1904.09751) on what top-k left, min-p (arXiv 2407.01082), and typical
sampling (arXiv 2202.00666) on what these left. All of them work on probabilities after temperature.
"""

from __future__ import annotations

import math

from engine.protocol import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy: a float32 column cannot hold the smallest of them, and none of them would draw otherwise."""

LOG2_E = 1.4426950408889634


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the largest logit is taken, the lowest id among equals; a single candidate is that one too."""
    return sampling.temperature < GREEDY_BELOW or sampling.top_k == 1


def scale_of(sampling: SamplingParams) -> float:
    """What logits are multiplied by to count binary orders of probability; 0 is greedy."""
    return 0.0 if is_greedy(sampling) else LOG2_E / sampling.temperature


def neg_log2_min_p_of(sampling: SamplingParams) -> float:
    """−log2(min_p): min-p keeps what lies at most so many binary orders below the likeliest token; inf is off."""
    return -math.log2(sampling.min_p) if sampling.min_p > 0.0 else math.inf


def is_filtered(sampling: SamplingParams) -> bool:
    """Whether anything is left out before a token is drawn."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0 or sampling.typical_p < 1.0
