"""How many prefill tokens a step may compute beside its decodes, from the inter-token target of what is running. No torch.

A step makes every running request wait, so its length is chosen, not its number of tokens: a chunk at position 100,000 costs
several times one at 0. Without decodes no request waits for a token, and the step may last as long as the longest gap allowed.
With them, the step ends just before the target. (Letting a step last longer because earlier ones were short gains nothing: the
same work is done, and the mean moves up to the target.) A chunk never falls below a minimum, so that prefill does not starve
beside many long decodes.

Where steps are rounded up to the size of a graph, a chunk that would end with the step's time is cut to end at a size instead:
the time left over would go into padding.

Chunked prefill beside decodes: Sarathi-Serve, arXiv 2403.02310. There the chunk is a constant chosen per workload; here it
follows from the step-time model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from engine.scheduling.step_time import StepTimeModel

PLANNED_SHARE = 0.98
"""A step is planned for this share of its limit. The rest is for what the formula does not include."""

GAP_OF_TARGET = 1.2
"""Without decodes a step may last this many targets: no request waits for a token, but one may arrive."""

CROWDED_SHARE = 0.9
"""No request starts while decodes alone take more than this share of the target: a prompt must find room beside them."""

CUT_RATIO_MAX = 1.25
"""As a multiple of the largest size: steps of more tokens are not cut to a size, because they would lose too much by it."""

SCALE_MIN, SCALE_MAX = 0.25, 16.0
SCALE_RATE = 1 / 64
"""Weight of one observation: a scale follows a device that slows down within about a hundred steps of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTargets:
    """Seconds between two tokens of a running request, and of the longest step without one; and the smallest chunk."""

    target_s: float = 0.025
    gap_max_s: float = 0.030
    chunk_tokens_min: int = 64

    @classmethod
    def from_target(cls, target_s: float) -> BudgetTargets:
        return cls(target_s=target_s, gap_max_s=GAP_OF_TARGET * target_s)


class StepBudget:
    """Divides the time of one step. `begin_step` opens it, `chunk` takes from it."""

    def __init__(self, model: StepTimeModel, targets: BudgetTargets | None = None, *, sizes: Sequence[int] = ()) -> None:
        """`sizes`: tokens to which steps with chunks are rounded up where padding costs time, in ascending order."""
        self.model = model
        self._sizes = sizes
        self.targets = BudgetTargets() if targets is None else targets
        self.decode_scale = self.chunk_scale = 1.0
        self._limit_s = 0.0
        self._fixed_s = 0.0
        self._num_tokens = 0
        self._num_rows = 0
        self._has_chunk = self._is_full = False

    def begin_step(self, num_decodes: int, sum_context: int) -> None:
        """Open a step with `num_decodes` decodes, whose cached tokens sum to `sum_context`."""
        targets = self.targets
        self._limit_s = PLANNED_SHARE * (targets.target_s if num_decodes else targets.gap_max_s) / self.chunk_scale
        self._fixed_s = self.model.host_s + self.model.context_s * sum_context
        self._num_tokens = self._num_rows = num_decodes
        self._has_chunk = self._is_full = False

    def is_crowded(self, num_decodes: int, sum_context: int) -> bool:
        """Whether one more request would slow all decoding requests below their target; their cached tokens sum to
        `sum_context`.

        If a single request can hardly meet the target, no request is kept out before steps take twice as long as the shortest.
        """
        model = self.model
        decodes_s = model.step_s(num_tokens=num_decodes, num_rows=num_decodes, context_tokens=sum_context, attention_pairs=0.0)
        least_s = model.host_s + model.weights_s(1)
        return num_decodes > 0 and decodes_s > max(CROWDED_SHARE * self.targets.target_s / self.decode_scale, 2 * least_s)

    def chunk(self, start: int, requested: int) -> int:
        """Take up to `requested` prefill tokens of a request that has `start` computed; 0 when the step is full."""
        room = 0 if self._is_full else self._max_chunk(start)
        num_tokens = min(requested, room)
        if room < requested:
            num_tokens = self._cut_to_size(num_tokens)
        if not self._has_chunk:
            num_tokens = max(num_tokens, min(requested, self.targets.chunk_tokens_min))
        if num_tokens <= 0:
            return 0
        self._has_chunk = True
        self._num_tokens += num_tokens
        self._fixed_s += self.model.context_s * start + self.model.pair_s * num_tokens * (start + num_tokens / 2)
        return num_tokens

    def _cut_to_size(self, num_tokens: int) -> int:
        """`num_tokens`, or fewer so that the step has one of the sizes, if they are worth a chunk. In that case it is full."""
        total = self._num_tokens + num_tokens
        if not self._sizes or total > CUT_RATIO_MAX * self._sizes[-1]:
            return num_tokens
        index = bisect_right(self._sizes, total)
        fitting = self._sizes[index - 1] - self._num_tokens if index else 0
        if fitting < self.targets.chunk_tokens_min:
            return num_tokens
        self._is_full = True
        return fitting

    def _max_chunk(self, start: int) -> int:
        """Largest chunk whose products, weights and attention still end within the limit."""
        model = self.model
        left_s = self._limit_s - self._fixed_s - model.context_s * start
        products_s = model.token_s * self._num_tokens + model.sampled_row_s * (self._num_rows + 1)
        by_products = _solve(model.pair_s, model.token_s + model.pair_s * start, left_s - products_s)
        by_weights = _solve(model.pair_s, model.pair_s * start, left_s - model.weights_s(self._num_tokens))
        return int(min(by_products, by_weights))

    def observe(self, predicted_s: float, measured_s: float, *, has_chunk: bool) -> None:
        """Follow a device that is slower or faster than the model says, by an exponential mean of the ratio. Steps with prompt
        chunks have a mean of their own, because they are computed in another way than decodes."""
        if predicted_s <= 0:
            return
        ratio = min(max(measured_s / predicted_s, SCALE_MIN), SCALE_MAX)
        if has_chunk:
            self.chunk_scale += (ratio - self.chunk_scale) * SCALE_RATE
        else:
            self.decode_scale += (ratio - self.decode_scale) * SCALE_RATE


def _solve(pair_s: float, linear_s: float, left_s: float) -> float:
    """Largest c ≥ 0 with pair_s·c²/2 + linear_s·c ≤ left_s."""
    if left_s <= 0:
        return 0.0
    return 2 * left_s / (linear_s + sqrt(linear_s * linear_s + 2 * pair_s * left_s))
