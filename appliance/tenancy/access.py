"""Access control: what an authenticated caller may see and do. The only place that limits reads to the visible tenants.

To a caller who may not see it, a tenant does not exist. Every store method that reads a tenant's data takes an `Access`: list
queries pass through `narrow`, single rows through `row`. Knows no HTTP and no table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sqlalchemy import ColumnElement, Select

from appliance.base.acting import SYSTEM, Actor
from appliance.base.errors import NotFound, RoleNotAllowed
from appliance.tenancy.principals import Principal
from appliance.tenancy.roles import ALLOWED, ALLOWED_IN_TENANT, Action, Role, TenantRole, not_allowed

Row = TypeVar("Row", bound=tuple[Any, ...])


class Owned(Protocol):
    """A row that belongs to a tenant, or to the appliance when `tenant_id` is None."""

    @property
    def tenant_id(self) -> str | None:
        """Return the id of the owning tenant; None is the appliance."""
        ...


OwnedRow = TypeVar("OwnedRow", bound=Owned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """A caller's permissions as of one request: a role on the appliance, and roles in individual tenants."""

    role: Role
    actor: Actor
    tenants: Mapping[str, TenantRole] = field(default_factory=dict)

    @property
    def sees_all(self) -> bool:
        """Return whether the caller may see the appliance and every tenant."""
        return self.role is not Role.MEMBER

    def sees(self, tenant_id: str) -> bool:
        """Return whether the caller may see this tenant."""
        return self.sees_all or tenant_id in self.tenants

    def may(self, action: Action, tenant_id: str | None = None) -> bool:
        """Return whether `action` is allowed in this tenant, or on the appliance when None."""
        if action in ALLOWED[self.role]:
            return True
        role = None if tenant_id is None else self.tenants.get(tenant_id)
        return role is not None and action in ALLOWED_IN_TENANT[role]

    def may_somewhere(self, action: Action) -> bool:
        """Return whether `action` is allowed on the appliance or in any tenant."""
        return self.may(action) or any(action in ALLOWED_IN_TENANT[role] for role in self.tenants.values())

    def require(self, action: Action, tenant_id: str | None = None) -> None:
        """Raise RoleNotAllowed unless `action` is allowed, and NotFound for a tenant that the caller may not see."""
        if tenant_id is not None and not self.sees(tenant_id):
            raise NotFound("no such tenant", param="tenant_id")
        if not self.may(action, tenant_id):
            raise self._refusal(action, tenant_id)

    def row(self, found: OwnedRow | None, action: Action, *, what: str, param: str) -> OwnedRow:
        """Return `found`, the result of a look-up by id (None: no such row), if `action` is allowed on it.

        Raises RoleNotAllowed, and NotFound with the same message for a missing row and for an invisible one.
        """
        if found is None or not (self.sees_all if found.tenant_id is None else self.sees(found.tenant_id)):
            raise NotFound(f"no such {what}", param=param)
        self.require(action, found.tenant_id)
        return found

    def require_somewhere(self, action: Action) -> None:
        """Raise RoleNotAllowed unless `action` is allowed somewhere; the handler must then narrow its query."""
        if not self.may_somewhere(action):
            raise self._refusal(action, None)

    def within(self, action: Action) -> frozenset[str] | None:
        """Return the ids of the tenants in which `action` is allowed; None means all."""
        if self.may(action):
            return None
        return frozenset(tenant_id for tenant_id in self.tenants if self.may(action, tenant_id))

    def narrow(self, query: Select[Row], column: ColumnElement[Any], action: Action = Action.READ) -> Select[Row]:
        """Return `query` limited to tenants in which `action` is allowed; rows without a tenant belong to the appliance."""
        return query.where(*self.conditions(column, action))

    def conditions(self, column: ColumnElement[Any], action: Action = Action.READ) -> Collection[ColumnElement[bool]]:
        """Return the WHERE conditions that `narrow` adds, for queries built from a list of conditions."""
        allowed = self.within(action)
        return () if allowed is None else (column.in_(sorted(allowed)),)

    def _refusal(self, action: Action, tenant_id: str | None) -> RoleNotAllowed:
        tenant_role = self.tenants.get(tenant_id) if tenant_id is not None else None
        role = f"{tenant_role} of this tenant" if tenant_role is not None and not self.sees_all else f"{self.role}"
        return not_allowed(role, action)


WHOLE_APPLIANCE = Access(role=Role.OWNER, actor=SYSTEM)
"""Full access to the whole appliance, for its own background work."""


def access_of_key(principal: Principal, actor: Actor) -> Access:
    """Return the read access of an API key to its own tenant, for the read endpoints that accept keys."""
    return Access(role=Role.MEMBER, actor=actor, tenants={principal.tenant.id: TenantRole.VIEWER})
