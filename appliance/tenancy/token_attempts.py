"""Slows down guessing of administrator tokens: an address may send a burst of wrong ones, then one per interval.

A token that was right before takes no attempt, whatever else its address has sent: a stranger behind the same proxy cannot lock
out anybody who already uses the appliance. A token not seen before is looked up by one request at a time, so that a right one
takes a single attempt even if many connections first use it at the same moment. Kept in memory and bounded; a restart forgets
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from appliance.base.clock import Clock
from appliance.tenancy.attempts import Allowance, Attempts
from appliance.tenancy.networks import site_of

PER_ADDRESS = Allowance(burst=100, refill_s=1.0)
ADDRESSES_MAX = 10_000
KNOWN_MAX = 1_000


class TokenAttempts:
    """The attempts of all addresses. Each is counted before the look-up, so that parallel guesses do not slip through."""

    def __init__(self, clock: Clock) -> None:
        self._salt = os.urandom(16)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # digests of tokens that were right
        self._under_way: dict[bytes, asyncio.Future[None]] = {}  # done when the look-up of this token has ended
        self._attempts: Attempts[str] = Attempts(clock, keys_max=ADDRESSES_MAX, refusal="too many wrong administrator tokens")

    @asynccontextmanager
    async def attempt(self, address: str, secret: str) -> AsyncIterator[None]:
        """Look up the token inside this context, then call `was_right`, `was_wrong` or `give_back`. Takes an attempt unless the
        token is known to be right. Raises RateLimitExceeded with the exact wait."""
        digest = self._digest(secret)
        while digest not in self._known and digest in self._under_way:
            await asyncio.wait({self._under_way[digest]})
        if digest in self._known:
            yield
            return
        self._attempts.take({site_of(address): PER_ADDRESS})
        over = self._under_way[digest] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._under_way[digest]
            over.set_result(None)

    def was_right(self, address: str, secret: str) -> None:
        """Give the attempt back; from now on this token needs none."""
        self.give_back(address, secret)
        digest = self._digest(secret)
        self._known[digest] = None
        self._known.move_to_end(digest)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def give_back(self, address: str, secret: str) -> None:
        """Give the attempt back, if one was taken: the look-up failed, so nobody learned whether the token is right."""
        if self._digest(secret) not in self._known:
            self._attempts.give_back(site_of(address), PER_ADDRESS)

    def was_wrong(self, secret: str) -> None:
        """Forget that this token was right, if it was: each attempt with it counts again."""
        self._known.pop(self._digest(secret), None)

    def _digest(self, secret: str) -> bytes:
        return hashlib.blake2b(secret.encode(errors="surrogatepass"), key=self._salt, digest_size=16).digest()
