"""The sections of the console in the order of the menu, and who sees which. Knows no page."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action


@dataclass(frozen=True, slots=True)
class Section:
    """One entry of the menu. `icon` is a file of `fragments/icons`; it is there for whom `action` is covered somewhere."""

    address: str
    name: str
    icon: str
    action: Action


SECTIONS = (
    Section("/", "Overview", "overview", Action.READ_BOX),
    Section("/requests", "Requests", "requests", Action.READ),
    Section("/tenants", "Tenants", "tenants", Action.READ),
    Section("/keys", "Keys", "keys", Action.READ),
    Section("/usage", "Usage", "usage", Action.READ),
    Section("/invoices", "Invoices", "invoices", Action.INVOICES),
    Section("/prices", "Prices", "prices", Action.READ_BOX),
    Section("/members", "Members", "members", Action.READ_BOX),
    Section("/audit", "Audit", "audit", Action.AUDIT),
)


def sections_of(access: Access | None) -> list[Section]:
    """Return the sections that somebody with `access` can open; a visitor opens none."""
    return [section for section in SECTIONS if access is not None and access.may_somewhere(section.action)]
