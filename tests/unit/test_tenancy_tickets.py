"""Sign-in tickets in cookies: they are accepted once, and a bounded number of used ones is remembered."""

from __future__ import annotations

import pytest

from appliance.tenancy import tickets
from appliance.tenancy.tickets import TICKET_CHARS_MAX, Tickets
from tests.support.clock import FakeClock


@pytest.fixture
def sign_in_tickets(clock: FakeClock) -> Tickets:
    return Tickets(b"a pepper of thirty-two characters", "sign-in", clock, life_s=300)


def test_used_tickets_beyond_the_limit_are_forgotten_oldest_first(
    sign_in_tickets: Tickets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tickets, "USED_MAX", 2)
    used = [sign_in_tickets.issue({"member_id": name}) for name in ("alice", "bob", "charlie")]
    for ticket in used:
        sign_in_tickets.mark_used(ticket)

    assert [sign_in_tickets.read(ticket) for ticket in used] == [{"member_id": "alice"}, None, None]


def test_a_ticket_too_long_for_a_cookie_is_not_accepted(sign_in_tickets: Tickets) -> None:
    assert sign_in_tickets.read(sign_in_tickets.issue({"verifier": "x" * (TICKET_CHARS_MAX // 2)})) is not None
    assert sign_in_tickets.read(sign_in_tickets.issue({"verifier": "x" * TICKET_CHARS_MAX})) is None
