"""Rate limits sign-in attempts per address and per account: a burst, then one per interval.

Kept in bounded memory. A restart resets the counts, which is acceptable: each password attempt also costs a slow hash, and each
attempt at a code needs the right password first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from appliance.base.clock import Clock
from appliance.base.errors import RateLimitExceeded
from appliance.tenancy.attempts import AttemptRate, Attempts
from appliance.tenancy.networks import client_network

ENTRIES_MAX = 10_000

PER_ACCOUNT = AttemptRate(burst=8, refill_s=30.0)
# Higher, because a whole office may share one address.
PER_ADDRESS = AttemptRate(burst=30, refill_s=5.0)
# Three of a million codes are valid at a time: if the password is known, a month of guessing succeeds one time in forty.
PER_MEMBER_CODES = AttemptRate(burst=5, refill_s=300.0)


class LoginAttempts:
    """Counts attempts before the password is checked, so that parallel guesses cannot exceed the limit."""

    def __init__(self, clock: Clock) -> None:
        self._attempts: Attempts[tuple[str, str]] = Attempts(clock, keys_max=ENTRIES_MAX, refusal="Too many sign-in attempts.")

    def count(self, *, address: str, account: str) -> None:
        """Take one password attempt of the address and the account, or raise RateLimitExceeded with the exact wait."""
        self._attempts.take(
            {("address", client_network(address)): PER_ADDRESS, ("account", account.strip().casefold()): PER_ACCOUNT}
        )

    @contextmanager
    def counted(self, *, address: str, account: str) -> Iterator[None]:
        """As `count`, for the check within the block. One that is refused unchecked does not count against the account."""
        self.count(address=address, account=account)
        try:
            yield
        except RateLimitExceeded:
            self._attempts.refund(("account", account.strip().casefold()), PER_ACCOUNT)
            raise

    def count_code(self, *, address: str, member_id: str) -> None:
        """Take one attempt at a second-factor code of the address and the member, or raise RateLimitExceeded."""
        self._attempts.take({("address", client_network(address)): PER_ADDRESS, ("code", member_id): PER_MEMBER_CODES})

    def count_address(self, *, address: str) -> None:
        """Take one attempt of the address at any other way of signing in, or raise RateLimitExceeded."""
        self._attempts.take({("address", client_network(address)): PER_ADDRESS})

    def reset_account(self, *, account: str) -> None:
        """Reset the attempts of an account after a successful password check."""
        self._attempts.forget(("account", account.strip().casefold()))

    def reset_codes(self, *, member_id: str) -> None:
        """Reset the attempts of a member after a correct code."""
        self._attempts.forget(("code", member_id))
