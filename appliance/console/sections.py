"""The sections of the console in the order of the menu, and the actions that show them. Knows no page."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action


@dataclass(frozen=True, slots=True)
class Section:
    """A menu entry, shown to members who may do one of `actions` anywhere. `icon` is a file in `fragments/icons`."""

    path: str
    name: str
    icon: str
    actions: tuple[Action, ...]


SECTIONS = (
    Section("/", "Overview", "overview", (Action.READ_APPLIANCE,)),
    Section("/requests", "Requests", "requests", (Action.READ,)),
    Section("/tenants", "Tenants", "tenants", (Action.READ,)),
    Section("/keys", "Keys", "keys", (Action.READ,)),
    Section("/usage", "Usage", "usage", (Action.READ,)),
    Section("/invoices", "Invoices", "invoices", (Action.INVOICES,)),
    Section("/prices", "Prices", "prices", (Action.READ_APPLIANCE,)),
    Section("/members", "Members", "members", (Action.READ_APPLIANCE,)),
    Section("/alerts", "Alerts", "alerts", (Action.READ_APPLIANCE, Action.WEBHOOKS)),
    Section("/audit", "Audit", "audit", (Action.AUDIT,)),
    Section("/settings", "Settings", "settings", (Action.READ_APPLIANCE,)),
)


def sections_of(access: Access | None) -> list[Section]:
    """Return the sections that `access` allows; none for visitors who are not signed in."""
    if access is None:
        return []
    return [section for section in SECTIONS if any(access.may_somewhere(action) for action in section.actions)]
