"""Rate limiter for attempts: a burst per key, then one per interval (GCRA). Kept in bounded memory; a restart resets it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from appliance.base.clock import Clock
from appliance.base.errors import RateLimitExceeded

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class AttemptRate:
    """`burst` attempts at once, and one more every `refill_s` seconds."""

    burst: int
    refill_s: float


class Attempts(Generic[K]):
    """Counts the attempts of at most `keys_max` keys; evicts the least recently used."""

    def __init__(self, clock: Clock, *, keys_max: int, refusal: str) -> None:
        """`refusal` is the message of the RateLimitExceeded error."""
        self._clock = clock
        self._keys_max = keys_max
        self._refusal = refusal
        # GCRA: the time at which the key's bucket will be full again encodes its level in one number.
        self._full_at: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, rates: Mapping[K, AttemptRate]) -> None:
        """Take one attempt from each key. If any has none left, take none and raise RateLimitExceeded with the exact wait."""
        now = self._clock.monotonic_s()
        wait_s = max(self._wait_s(key, rate, now) for key, rate in rates.items())
        if wait_s > 0:
            raise RateLimitExceeded(self._refusal, limit_type="requests", retry_after_s=wait_s)
        for key, rate in rates.items():
            self._full_at[key] = max(self._full_at.get(key, now), now) + rate.refill_s
            self._full_at.move_to_end(key)
            while len(self._full_at) > self._keys_max:
                self._full_at.popitem(last=False)

    def refund(self, key: K, rate: AttemptRate) -> None:
        """Return one attempt that was taken."""
        full_at = self._full_at.get(key)
        if full_at is not None:
            self._full_at[key] = full_at - rate.refill_s

    def forget(self, key: K) -> None:
        """Return all attempts of `key`."""
        self._full_at.pop(key, None)

    def _wait_s(self, key: K, rate: AttemptRate, now: float) -> float:
        used_s = max(self._full_at.get(key, now) - now, 0.0)
        return used_s + rate.refill_s - rate.burst * rate.refill_s
