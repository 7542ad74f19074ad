"""Slows down guessing of passwords and codes: a burst of attempts, then one per interval, per address and per account.

Kept in memory and bounded. A restart forgets the counts, which is acceptable: an attempt at a password also costs a slow hash,
and one at a code needs the right password first.
"""

from __future__ import annotations

from appliance.base.clock import Clock
from appliance.tenancy.attempts import Allowance, Attempts
from appliance.tenancy.networks import client_network

ENTRIES_MAX = 10_000

PER_ACCOUNT = Allowance(burst=8, refill_s=30.0)
# Higher, because a proxy may put a whole office behind one address.
PER_ADDRESS = Allowance(burst=30, refill_s=5.0)
# Three of a million codes are valid at a time: with the password, guessing for a whole month succeeds one time in forty.
PER_MEMBER_CODES = Allowance(burst=5, refill_s=300.0)


class LoginAttempts:
    """Counts attempts before the password is checked, so that parallel guesses do not slip through."""

    def __init__(self, clock: Clock) -> None:
        self._attempts: Attempts[tuple[str, str]] = Attempts(
            clock, keys_max=ENTRIES_MAX, refusal="Too many attempts to sign in."
        )

    def count(self, *, address: str, account: str) -> None:
        """Take one attempt at a password from both allowances, or raise RateLimitExceeded with the exact wait and take none."""
        self._attempts.take(
            {("address", client_network(address)): PER_ADDRESS, ("account", account.strip().casefold()): PER_ACCOUNT}
        )

    def count_code(self, *, address: str, member_id: str) -> None:
        """Take one attempt at a code of the second factor, or raise RateLimitExceeded and take none."""
        self._attempts.take({("address", client_network(address)): PER_ADDRESS, ("code", member_id): PER_MEMBER_CODES})

    def count_address(self, *, address: str) -> None:
        """Take one attempt at any other way of signing in, or raise RateLimitExceeded and take none."""
        self._attempts.take({("address", client_network(address)): PER_ADDRESS})

    def reset_account(self, *, account: str) -> None:
        """Forget the attempts of an account whose owner has just proven the password."""
        self._attempts.forget(("account", account.strip().casefold()))

    def reset_codes(self, *, member_id: str) -> None:
        """Forget the attempts of a member whose code was right."""
        self._attempts.forget(("code", member_id))
