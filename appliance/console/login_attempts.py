"""Slows down guessing of passwords and codes: a few attempts at once, then one every so often, per address and per account.

Kept in memory and bounded; a restart forgets it, which is acceptable because an attempt at a password also costs a slow hash,
and one at a code comes after a password that was right.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from appliance.base.clock import Clock
from appliance.base.errors import RateLimitExceeded
from appliance.tenancy.networks import site_of

ENTRIES_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Allowance:
    """`burst` attempts at once, and one more every `refill_s` seconds."""

    burst: int
    refill_s: float


PER_ACCOUNT = Allowance(burst=8, refill_s=30.0)
# Higher, because a proxy may put a whole office behind one address.
PER_ADDRESS = Allowance(burst=30, refill_s=5.0)
# Three codes of a million are good at a time: who knows the password and guesses for a whole month succeeds one time in forty.
PER_MEMBER_CODES = Allowance(burst=5, refill_s=300.0)


class LoginAttempts:
    """Counts attempts before the password is looked at, so that parallel guesses do not slip through."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Each entry is the time at which it will be full again: one number holds the level of a bucket (GCRA).
        self._full_at: OrderedDict[tuple[str, str], float] = OrderedDict()

    def count(self, *, address: str, account: str) -> None:
        """Take one attempt at a password from both allowances, or raise RateLimitExceeded with the exact wait and take none."""
        self._count({("address", site_of(address)): PER_ADDRESS, ("account", account.strip().casefold()): PER_ACCOUNT})

    def count_code(self, *, address: str, member_id: str) -> None:
        """Take one attempt at a code of the second factor, or raise RateLimitExceeded and take none."""
        self._count({("address", site_of(address)): PER_ADDRESS, ("code", member_id): PER_MEMBER_CODES})

    def count_address(self, *, address: str) -> None:
        """Take one attempt at anything else that signs in, or raise RateLimitExceeded and take none."""
        self._count({("address", site_of(address)): PER_ADDRESS})

    def forgive(self, *, account: str) -> None:
        """Forget the attempts of an account whose owner has just proven the password."""
        self._full_at.pop(("account", account.strip().casefold()), None)

    def forgive_codes(self, *, member_id: str) -> None:
        """Forget the attempts of a member whose code was right."""
        self._full_at.pop(("code", member_id), None)

    def _count(self, keys: dict[tuple[str, str], Allowance]) -> None:
        now = self._clock.monotonic_s()
        wait_s = max(self._wait_s(key, allowance, now) for key, allowance in keys.items())
        if wait_s > 0:
            raise RateLimitExceeded("Too many attempts to sign in.", limit_type="requests", retry_after_s=wait_s)
        for key, allowance in keys.items():
            self._take(key, allowance, now)

    def _wait_s(self, key: tuple[str, str], allowance: Allowance, now: float) -> float:
        used_s = max(self._full_at.get(key, now) - now, 0.0)
        return used_s + allowance.refill_s - allowance.burst * allowance.refill_s

    def _take(self, key: tuple[str, str], allowance: Allowance, now: float) -> None:
        self._full_at[key] = max(self._full_at.get(key, now), now) + allowance.refill_s
        self._full_at.move_to_end(key)
        while len(self._full_at) > ENTRIES_MAX:
            self._full_at.popitem(last=False)
