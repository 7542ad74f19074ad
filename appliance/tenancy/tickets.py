"""Tickets: what a browser carries from one step of signing in to the next, sealed, so that the server keeps nothing of it.

A ticket opens nothing by itself. It says what was proven and when; each step proves something more, and it soon expires.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta

from appliance.base.clock import Clock
from appliance.base.sealing import Sealer, Unsealable

SIGN_IN_LIFE_S = 5 * 60  # between the password and the code
TICKET_CHARS_MAX = 4000  # a browser keeps no longer cookie
_EXPIRES = "expires_at"


class Tickets:
    """Tickets of one `purpose`, good for `life_s` seconds."""

    def __init__(self, pepper: bytes, purpose: str, clock: Clock, *, life_s: int) -> None:
        self._sealer = Sealer(pepper, purpose)
        self._clock = clock
        self.life_s = life_s

    def issue(self, facts: Mapping[str, str]) -> str:
        """Return a ticket that holds `facts`."""
        expires_at = self._clock.now() + timedelta(seconds=self.life_s)
        return self._sealer.seal(json.dumps({**facts, _EXPIRES: expires_at.isoformat()}))

    def read(self, ticket: str | None) -> dict[str, str] | None:
        """Return the facts of `ticket`, or None when it is none of ours, was changed, or has expired."""
        if not ticket or len(ticket) > TICKET_CHARS_MAX:
            return None
        try:
            facts: dict[str, str] = json.loads(self._sealer.open(ticket))
        except (Unsealable, ValueError):
            return None
        return facts if self._clock.now() < datetime.fromisoformat(facts.pop(_EXPIRES)) else None
