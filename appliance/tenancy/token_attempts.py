"""Rate limits guesses of administrator tokens: per client address a burst of wrong tokens, then one per interval.

A token that was valid before is exempt, whatever else its address sends: an attacker behind the same proxy cannot lock out
existing users. Concurrent first uses of one token wait for a single look-up, so that a valid token takes one attempt even if
many connections start with it at once. Kept in bounded memory; a restart resets it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from appliance.base.clock import Clock
from appliance.tenancy.attempts import AttemptRate, Attempts
from appliance.tenancy.networks import client_network

PER_ADDRESS = AttemptRate(burst=100, refill_s=1.0)
ADDRESSES_MAX = 10_000
KNOWN_MAX = 1_000


class TokenAttempts:
    """Counts attempts by address, before the look-up, so that parallel guesses cannot exceed the limit."""

    def __init__(self, clock: Clock) -> None:
        self._salt = os.urandom(16)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # digests of tokens that were valid
        self._lookups: dict[bytes, asyncio.Future[None]] = {}  # by digest; done when the look-up has ended
        self._attempts: Attempts[str] = Attempts(clock, keys_max=ADDRESSES_MAX, refusal="too many wrong administrator tokens")

    @asynccontextmanager
    async def attempt(self, address: str, secret: str) -> AsyncIterator[None]:
        """Context for the look-up of a token; inside it call `record_success`, `record_failure` or `refund`. Takes an attempt
        unless the token was valid before. Raises RateLimitExceeded with the exact wait."""
        digest = self._digest(secret)
        while digest not in self._known and digest in self._lookups:
            await asyncio.wait({self._lookups[digest]})
        if digest in self._known:
            yield
            return
        self._attempts.take({client_network(address): PER_ADDRESS})
        ended = self._lookups[digest] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._lookups[digest]
            ended.set_result(None)

    def record_success(self, address: str, secret: str) -> None:
        """Refund the attempt and exempt this token from now on."""
        self.refund(address, secret)
        digest = self._digest(secret)
        self._known[digest] = None
        self._known.move_to_end(digest)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def refund(self, address: str, secret: str) -> None:
        """Refund the attempt, if one was taken: the look-up failed, so the sender learned nothing about the token."""
        if self._digest(secret) not in self._known:
            self._attempts.refund(client_network(address), PER_ADDRESS)

    def record_failure(self, secret: str) -> None:
        """End the exemption of this token, if it had one: attempts with it count again."""
        self._known.pop(self._digest(secret), None)

    def _digest(self, secret: str) -> bytes:
        return hashlib.blake2b(secret.encode(errors="surrogatepass"), key=self._salt, digest_size=16).digest()
