"""Slows down guessing of administrator tokens: so many wrong ones at once from an address, then one every so often.

A token that was right before is looked up whatever its address has sent since: a stranger behind the same proxy locks nobody
out who is in. Kept in memory and bounded; a restart forgets it.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict

from appliance.base.clock import Clock
from appliance.base.errors import RateLimitExceeded
from appliance.tenancy.networks import site_of

BURST = 100
REFILL_S = 1.0
ADDRESSES_MAX = 10_000
KNOWN_MAX = 1_000


class TokenAttempts:
    """Counts before the token is looked up, so that parallel guesses do not slip through."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._salt = os.urandom(16)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # digests of tokens that were right
        self._full_at: OrderedDict[str, float] = OrderedDict()  # when the allowance of a site will be full again (GCRA)

    def begin(self, address: str, secret: str) -> None:
        """Take an attempt, or raise RateLimitExceeded with the exact wait and take none."""
        if self._digest(secret) in self._known:
            return
        site, now = site_of(address), self._clock.monotonic_s()
        full_at = max(self._full_at.get(site, now), now)
        wait_s = full_at - now + REFILL_S - BURST * REFILL_S
        if wait_s > 0:
            raise RateLimitExceeded("too many wrong administrator tokens", limit_type="requests", retry_after_s=wait_s)
        self._full_at[site] = full_at + REFILL_S
        self._full_at.move_to_end(site)
        while len(self._full_at) > ADDRESSES_MAX:
            self._full_at.popitem(last=False)

    def was_right(self, address: str, secret: str) -> None:
        """Give the attempt back, and let this token in without one from now on."""
        self.give_back(address, secret)
        digest = self._digest(secret)
        self._known[digest] = None
        self._known.move_to_end(digest)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def give_back(self, address: str, secret: str) -> None:
        """Give the attempt back, if one was taken: nobody found out whether the token is right."""
        site = site_of(address)
        full_at = self._full_at.get(site)
        if full_at is not None and self._digest(secret) not in self._known:
            self._full_at[site] = full_at - REFILL_S

    def was_wrong(self, secret: str) -> None:
        """Forget that this token was right, if it was: each attempt with it counts again."""
        self._known.pop(self._digest(secret), None)

    def _digest(self, secret: str) -> bytes:
        return hashlib.blake2b(secret.encode(errors="surrogatepass"), key=self._salt, digest_size=16).digest()
