"""Tickets: which ones a browser may reuse, and which are not ours."""

from __future__ import annotations

import pytest

from appliance.tenancy import tickets
from appliance.tenancy.tickets import TICKET_CHARS_MAX, Tickets
from tests.support.clock import FakeClock


@pytest.fixture
def ours(clock: FakeClock) -> Tickets:
    return Tickets(b"a pepper of thirty-two characters", "sign-in", clock, life_s=300)


def test_of_more_used_tickets_than_are_remembered_the_oldest_is_forgotten(
    ours: Tickets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tickets, "USED_MAX", 2)
    used = [ours.issue({"member_id": name}) for name in ("alice", "bob", "charlie")]
    for ticket in used:
        ours.mark_used(ticket)

    assert [ours.read(ticket) for ticket in used] == [{"member_id": "alice"}, None, None]


def test_what_no_browser_keeps_is_no_ticket(ours: Tickets) -> None:
    assert ours.read(ours.issue({"verifier": "x" * (TICKET_CHARS_MAX // 2)})) is not None
    assert ours.read(ours.issue({"verifier": "x" * TICKET_CHARS_MAX})) is None
