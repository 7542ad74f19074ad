"""Tickets: sealed state that a browser carries from one step of signing in to the next, so that the server need not keep it.

A ticket opens nothing by itself. It says what was proven so far, each step needs a further proof, and it soon expires. Used
tickets are remembered, in memory and bounded; a restart forgets them, but the next step still needs its own proof.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from datetime import datetime, timedelta

from appliance.base.clock import Clock
from appliance.base.sealing import Sealer, Unsealable
from appliance.tenancy.secrets import plain_digest

SIGN_IN_LIFE_S = 5 * 60  # between the password and the code
PROVIDER_SIGN_IN_LIFE_S = 10 * 60  # from our page to the provider's, a password and a code there, and back
TICKET_CHARS_MAX = 4000  # browsers keep no longer cookies
SPENT_MAX = 10_000
_EXPIRES = "expires_at"


class Tickets:
    """Tickets of one `purpose`, good for `life_s` seconds."""

    def __init__(self, pepper: bytes, purpose: str, clock: Clock, *, life_s: int) -> None:
        self._sealer = Sealer(pepper, purpose)
        self._clock = clock
        self._spent: OrderedDict[str, None] = OrderedDict()
        self.life_s = life_s

    def issue(self, facts: Mapping[str, str]) -> str:
        """Return a ticket that holds `facts`."""
        expires_at = self._clock.now() + timedelta(seconds=self.life_s)
        return self._sealer.seal(json.dumps({**facts, _EXPIRES: expires_at.isoformat()}))

    def read(self, ticket: str | None) -> dict[str, str] | None:
        """Return the facts of `ticket`, or None when it is not ours, was changed, has expired, or was used already."""
        if not ticket or len(ticket) > TICKET_CHARS_MAX or plain_digest(ticket) in self._spent:
            return None
        try:
            facts: dict[str, str] = json.loads(self._sealer.open(ticket))
        except (Unsealable, ValueError):
            return None
        return facts if self._clock.now() < datetime.fromisoformat(facts.pop(_EXPIRES)) else None

    def spend(self, ticket: str) -> None:
        """Mark `ticket` as used: it cannot be read again."""
        self._spent[plain_digest(ticket)] = None
        while len(self._spent) > SPENT_MAX:
            self._spent.popitem(last=False)
