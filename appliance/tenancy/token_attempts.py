"""Slows down guessing of administrator tokens: so many wrong ones at once from an address, then one every so often.

A token that was right before is looked up whatever its address has sent since: a stranger behind the same proxy locks nobody
out who is in. One that is not known yet is looked up once at a time, so that a right one that many connections use first at one
moment takes one attempt. Kept in memory and bounded; a restart forgets it.
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
    """Counts before the token is looked up, so that parallel guesses do not slip through."""

    def __init__(self, clock: Clock) -> None:
        self._salt = os.urandom(16)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # digests of tokens that were right
        self._under_way: dict[bytes, asyncio.Future[None]] = {}  # done when the look at this token is over
        self._attempts: Attempts[str] = Attempts(clock, keys_max=ADDRESSES_MAX, refusal="too many wrong administrator tokens")

    @asynccontextmanager
    async def attempt(self, address: str, secret: str) -> AsyncIterator[None]:
        """Look at a token inside, and say what it was. Takes an attempt, or none: it raises RateLimitExceeded with the exact
        wait, or the token is known to be right."""
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
        """Give the attempt back, and let this token in without one from now on."""
        self.give_back(address, secret)
        digest = self._digest(secret)
        self._known[digest] = None
        self._known.move_to_end(digest)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def give_back(self, address: str, secret: str) -> None:
        """Give the attempt back, if one was taken: nobody found out whether the token is right."""
        if self._digest(secret) not in self._known:
            self._attempts.give_back(site_of(address), PER_ADDRESS)

    def was_wrong(self, secret: str) -> None:
        """Forget that this token was right, if it was: each attempt with it counts again."""
        self._known.pop(self._digest(secret), None)

    def _digest(self, secret: str) -> bytes:
        return hashlib.blake2b(secret.encode(errors="surrogatepass"), key=self._salt, digest_size=16).digest()
