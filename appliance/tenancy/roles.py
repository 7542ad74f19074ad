"""What each role of the box may do: one table for the API and the console."""

from __future__ import annotations

from enum import StrEnum

from appliance.base.errors import RoleNotAllowed
from appliance.tenancy.fields import check_choice


class Role(StrEnum):
    """Roles of members and administrator tokens, from the most to the least."""

    OWNER = "owner"
    ADMIN = "admin"
    BILLING = "billing"
    VIEWER = "viewer"


class Action(StrEnum):
    """READ: every page and list. WRITE: tenants, keys, requests, models. BILLING: prices, invoices. MEMBERS: who signs in."""

    READ = "read"
    WRITE = "write"
    BILLING = "billing"
    MEMBERS = "members"


ALLOWED: dict[Role, frozenset[Action]] = {
    Role.OWNER: frozenset(Action),
    Role.ADMIN: frozenset({Action.READ, Action.WRITE, Action.BILLING}),
    Role.BILLING: frozenset({Action.READ, Action.BILLING}),
    Role.VIEWER: frozenset({Action.READ}),
}


def check_role(value: object) -> Role:
    """Return the role named `value`; raise InvalidValue when there is none."""
    return Role(check_choice(value, "role", [role.value for role in Role]))


def may(role: str, action: Action) -> bool:
    """Return whether `role` covers `action`."""
    return action in ALLOWED[Role(role)]


def require(role: str, action: Action) -> None:
    """Raise RoleNotAllowed unless `role` covers `action`."""
    if not may(role, action):
        raise RoleNotAllowed(f"the role {role} does not cover this ({action.value})")
