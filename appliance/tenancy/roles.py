"""Roles and the actions that each allows, on the appliance and in a tenant. Shared by API, console and command line."""

from __future__ import annotations

from enum import StrEnum

from appliance.base.errors import RoleNotAllowed
from appliance.tenancy.fields import check_choice


class Role(StrEnum):
    """Appliance-wide roles of members and administrator tokens, most powerful first. A token cannot be MEMBER."""

    OWNER = "owner"
    ADMIN = "admin"
    BILLING = "billing"
    VIEWER = "viewer"
    MEMBER = "member"
    """No appliance-wide role: permissions come from memberships only."""


class TenantRole(StrEnum):
    """Roles of a membership, which apply to its tenant only, most powerful first."""

    MANAGER = "manager"
    DEVELOPER = "developer"
    VIEWER = "viewer"


class Action(StrEnum):
    """Actions that a role can allow. Actions that no tenant role allows concern the whole appliance."""

    READ = "read"
    """Read tenants, keys, requests, usage and ledger of the visible tenants."""
    INVOICES = "invoices"
    """Read invoices, budgets and free allowances of the visible tenants."""
    AUDIT = "audit"
    """Read the audit log of the visible tenants."""
    KEYS = "keys"
    """Create, change, rotate and revoke keys."""
    ABORT = "abort"
    """Abort a running request."""
    TENANT_MEMBERS = "tenant_members"
    """Change who belongs to a tenant, and with which role."""
    WEBHOOKS = "webhooks"
    """Change where alerts about a tenant go."""
    READ_APPLIANCE = "read_appliance"
    """Read what belongs to no tenant: machine, engines, prices, tiers, model limits, server costs."""
    WRITE = "write"
    """Change tenants and their limits, tiers, model limits, engines."""
    BILLING = "billing"
    """Change prices, corrections and free allowances; close invoices; set their issuer."""
    MEMBERS = "members"
    """Change members, their roles on the appliance, administrator tokens, and other people's sessions."""


ACTION_PHRASES = {
    Action.READ: "read tenants and what they use",
    Action.INVOICES: "read invoices",
    Action.AUDIT: "read the audit log",
    Action.KEYS: "change keys",
    Action.ABORT: "abort requests",
    Action.TENANT_MEMBERS: "change who belongs to a tenant",
    Action.WEBHOOKS: "change where alerts go",
    Action.READ_APPLIANCE: "read what belongs to the whole appliance",
    Action.WRITE: "change tenants, limits and engines",
    Action.BILLING: "change prices, corrections and invoices",
    Action.MEMBERS: "change members, tokens and sessions",
}
"""Phrases that complete the error message "the role … may not …"."""
_READS = frozenset({Action.READ, Action.INVOICES, Action.AUDIT, Action.READ_APPLIANCE})
_TENANT_WRITES = frozenset({Action.KEYS, Action.ABORT, Action.TENANT_MEMBERS, Action.WEBHOOKS})

ALLOWED: dict[Role, frozenset[Action]] = {
    Role.OWNER: frozenset(Action),
    Role.ADMIN: _READS | _TENANT_WRITES | {Action.WRITE, Action.BILLING},
    Role.BILLING: _READS | {Action.BILLING},
    Role.VIEWER: _READS,
    Role.MEMBER: frozenset(),
}
ALLOWED_IN_TENANT: dict[TenantRole, frozenset[Action]] = {
    TenantRole.MANAGER: _TENANT_WRITES | {Action.READ, Action.INVOICES, Action.AUDIT},
    TenantRole.DEVELOPER: frozenset({Action.READ, Action.KEYS, Action.ABORT}),
    TenantRole.VIEWER: frozenset({Action.READ}),
}
TOKEN_ROLES = tuple(role for role in Role if role is not Role.MEMBER)


def check_role(value: object) -> Role:
    """Return the appliance role named `value`, `member` included. Raises InvalidValue."""
    return Role(check_choice(value, "role", [role.value for role in Role]))


def check_token_role(value: object) -> Role:
    """Return the appliance role named `value`, which may be any but `member`. Raises InvalidValue."""
    return Role(check_choice(value, "role", [role.value for role in TOKEN_ROLES]))


def check_tenant_role(value: object) -> TenantRole:
    """Return the tenant role named `value`. Raises InvalidValue."""
    return TenantRole(check_choice(value, "role", [role.value for role in TenantRole]))


def not_allowed(role: str, action: Action) -> RoleNotAllowed:
    """Return the error for an action that `role` does not allow."""
    return RoleNotAllowed(f"the role {role} may not {ACTION_PHRASES[action]}")
