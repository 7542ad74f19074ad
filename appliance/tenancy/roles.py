"""What each role may do, on the box and in a tenant: one table for API, console and command line. Knows no member."""

from __future__ import annotations

from enum import StrEnum

from appliance.base.errors import RoleNotAllowed
from appliance.tenancy.fields import check_choice


class Role(StrEnum):
    """Roles of members and administrator tokens on the whole box, the most powerful first. A token cannot be MEMBER."""

    OWNER = "owner"
    ADMIN = "admin"
    BILLING = "billing"
    VIEWER = "viewer"
    MEMBER = "member"
    """No role on the box: only what memberships give."""


class TenantRole(StrEnum):
    """Roles of a membership, which count only in its tenant, the most powerful first."""

    MANAGER = "manager"
    DEVELOPER = "developer"
    VIEWER = "viewer"


class Action(StrEnum):
    """What a role can allow. An action that no tenant role has concerns the box as a whole."""

    READ = "read"
    """Read tenants, keys, requests, usage and ledger, for the tenants that one may see."""
    INVOICES = "invoices"
    """Read invoices, budgets and allowances, for the tenants that one may see."""
    AUDIT = "audit"
    """Read the audit log, for the tenants that one may see."""
    KEYS = "keys"
    """Create, change, rotate and revoke keys."""
    ABORT = "abort"
    """End a running request."""
    TENANT_MEMBERS = "tenant_members"
    """Change who belongs to a tenant, and with which role."""
    WEBHOOKS = "webhooks"
    """Change where alerts about a tenant go."""
    READ_BOX = "read_box"
    """Read what belongs to no tenant: machine, engines, prices, tiers, limits of models, economics."""
    WRITE = "write"
    """Change tenants and their limits, tiers, limits of models, engines."""
    BILLING = "billing"
    """Change prices, corrections and allowances; close invoices; set their seller."""
    MEMBERS = "members"
    """Change who signs in, box roles, administrator tokens, and other people's sessions."""


WORDS = {
    Action.READ: "read tenants and what they use",
    Action.INVOICES: "read invoices",
    Action.AUDIT: "read the audit log",
    Action.KEYS: "change keys",
    Action.ABORT: "end requests",
    Action.TENANT_MEMBERS: "change who belongs to a tenant",
    Action.WEBHOOKS: "change where alerts go",
    Action.READ_BOX: "read what belongs to the whole appliance",
    Action.WRITE: "change tenants, limits and engines",
    Action.BILLING: "change prices, corrections and invoices",
    Action.MEMBERS: "change members, tokens and sessions",
}
"""Each action as it completes the refusal "the role … may not …"."""
_READS = frozenset({Action.READ, Action.INVOICES, Action.AUDIT, Action.READ_BOX})
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
    """Return the box role named `value`, `member` included; raise InvalidValue when there is none."""
    return Role(check_choice(value, "role", [role.value for role in Role]))


def check_token_role(value: object) -> Role:
    """Return the box role named `value` if a token may have it: any but `member`. Raises InvalidValue."""
    return Role(check_choice(value, "role", [role.value for role in TOKEN_ROLES]))


def check_tenant_role(value: object) -> TenantRole:
    """Return the role in a tenant named `value`; raise InvalidValue when there is none."""
    return TenantRole(check_choice(value, "role", [role.value for role in TenantRole]))


def not_allowed(role: str, action: Action) -> RoleNotAllowed:
    """Return the error for an action that `role` does not cover."""
    return RoleNotAllowed(f"the role {role} may not {WORDS[action]}")
