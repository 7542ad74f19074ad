"""The most KV slots that the running requests will need at once, if they end when predicted. Integers only.

Admission by predicted peak, as in lightllm: with running requests sorted by what they still have to write, the peak comes right
before one of them ends, and is the largest Σ slots of those that outlive it. A request that writes a token per step ends at a
fixed step, and `slots - step` is constant too. So a bucket of requests with similar ends is two integers, nothing is updated as
time passes, and the peak costs one pass over the buckets instead of a sort.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.scheduling.request import Request

BUCKET_STEPS = 32


@dataclass(slots=True)
class _Bucket:
    """Requests predicted to end within the same steps. Their values are slots minus step; see the module docstring."""

    members: dict[Request, int] = field(default_factory=dict)
    sum_bases: int = 0


class KvForecast:
    """`capacity` slots. Each request is entered with the step in which it is predicted to end and its slots by then."""

    def __init__(self, capacity: int, block_size: int) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._buckets: dict[int, _Bucket] = {}
        self._bucket_of: dict[Request, int] = {}
        self._sum_at_end = 0

    def fits(self, step: int, num_tokens: int, remaining: int) -> bool:
        """Whether a request of `num_tokens` slots that will write `remaining` more can join without a predicted shortage."""
        end, base = self._bucket_and_base(step, num_tokens, remaining)
        if self._sum_at_end + base + end * BUCKET_STEPS <= self._capacity:
            return True  # even if all of them ended at the same step
        return self._peak(end, base) <= self._capacity

    def _peak(self, joining_end: int, joining_base: int) -> int:
        peak = count = sum_bases = 0
        for end in sorted({*self._buckets, joining_end}, reverse=True):
            bucket = self._buckets.get(end)
            if bucket is not None:
                count += len(bucket.members)
                sum_bases += bucket.sum_bases
            if end == joining_end:
                count += 1
                sum_bases += joining_base
            peak = max(peak, sum_bases + count * end * BUCKET_STEPS)
        return peak

    def _bucket_and_base(self, step: int, num_tokens: int, remaining: int) -> tuple[int, int]:
        """Bucket number of the end, and slots minus step. The sum is exact at its own end, where the peaks are."""
        end = (step + remaining) // BUCKET_STEPS + 1
        blocks = -(-(num_tokens + remaining) // self._block_size)
        return end, blocks * self._block_size - end * BUCKET_STEPS

    def add(self, request: Request, step: int, num_tokens: int, remaining: int) -> None:
        end, base = self._bucket_and_base(step, num_tokens, remaining)
        bucket = self._buckets.setdefault(end, _Bucket())
        bucket.members[request] = base
        bucket.sum_bases += base
        self._bucket_of[request] = end
        self._sum_at_end += base + end * BUCKET_STEPS

    def remove(self, request: Request) -> None:
        end = self._bucket_of.pop(request)
        bucket = self._buckets[end]
        base = bucket.members.pop(request)
        bucket.sum_bases -= base
        self._sum_at_end -= base + end * BUCKET_STEPS
        if not bucket.members:
            del self._buckets[end]

    def renew(self, request: Request, step: int, remaining: int) -> None:
        """Predict a new end for a request that did not end at `step` as predicted."""
        num_tokens = self._buckets[self._bucket_of[request]].members[request] + step
        self.remove(request)
        self.add(request, step, num_tokens, remaining)

    def overdue(self, step: int) -> list[Request]:
        """Requests that should have ended before `step`; the caller must renew each."""
        if step % BUCKET_STEPS:
            return []
        bucket = self._buckets.get(step // BUCKET_STEPS)
        return [] if bucket is None else list(bucket.members)

    def check_invariants(self, requests: Iterable[Request], step: int) -> None:
        """Raise `AssertionError` unless the sums are those of the members, which are `requests` and end after `step`."""
        assert set(self._bucket_of) == set(requests), "the predictions are of other requests"
        for end, bucket in self._buckets.items():
            assert bucket.members, "an empty bucket was kept"
            assert end > step // BUCKET_STEPS, "the predicted end of a request is over"
            assert bucket.sum_bases == sum(bucket.members.values()), "the sum of a bucket is wrong"
        at_end = sum(b.sum_bases + len(b.members) * end * BUCKET_STEPS for end, b in self._buckets.items())
        assert at_end == self._sum_at_end, "the sum of all buckets is wrong"
