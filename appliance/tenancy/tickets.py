"""Tickets: encrypted state that the browser carries between the steps of a sign-in, so that the server need not store it.

A ticket alone grants nothing: it records what was proven so far, the next step needs its own proof, and it expires soon. Used
tickets are remembered in bounded memory, which a restart clears.
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
PROVIDER_SIGN_IN_LIFE_S = 10 * 60  # covers the redirect to the provider, password and code there, and the way back
TICKET_CHARS_MAX = 4000  # browsers reject longer cookies
USED_MAX = 10_000
_EXPIRES = "expires_at"


class Tickets:
    """Issues and reads tickets of one `purpose`, valid for `life_s` seconds."""

    def __init__(self, pepper: bytes, purpose: str, clock: Clock, *, life_s: int) -> None:
        self._sealer = Sealer(pepper, purpose)
        self._clock = clock
        self._used: OrderedDict[str, None] = OrderedDict()
        self.life_s = life_s

    def issue(self, payload: Mapping[str, str]) -> str:
        """Return a ticket with this payload."""
        expires_at = self._clock.now() + timedelta(seconds=self.life_s)
        return self._sealer.seal(json.dumps({**payload, _EXPIRES: expires_at.isoformat()}))

    def read(self, ticket: str | None) -> dict[str, str] | None:
        """Return the payload of `ticket`, or None if it is invalid, expired or already used."""
        if not ticket or len(ticket) > TICKET_CHARS_MAX or plain_digest(ticket) in self._used:
            return None
        try:
            payload: dict[str, str] = json.loads(self._sealer.open(ticket))
        except (Unsealable, ValueError):
            return None
        return payload if self._clock.now() < datetime.fromisoformat(payload.pop(_EXPIRES)) else None

    def mark_used(self, ticket: str) -> None:
        """Mark `ticket` as used, so that it cannot be read again."""
        self._used[plain_digest(ticket)] = None
        while len(self._used) > USED_MAX:
            self._used.popitem(last=False)
