"""What an authenticated caller may see and do: the one place where every read is narrowed to the tenants it may show.

A tenant that may not be seen looks like one that does not exist. Stores take an `Access` with every read of a tenant's data:
lists pass their query through `narrow`, single rows go through `row`. Knows no HTTP and no table.
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
    """A row that belongs to a tenant, or to the box when `tenant_id` is None."""

    @property
    def tenant_id(self) -> str | None:
        """Return the owner's id; None is the box."""
        ...


OwnedRow = TypeVar("OwnedRow", bound=Owned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The rights of one caller at one moment: a role on the box, and roles in single tenants."""

    role: Role
    actor: Actor
    tenants: Mapping[str, TenantRole] = field(default_factory=dict)

    @property
    def sees_all(self) -> bool:
        """Return whether every tenant and the box itself may be seen."""
        return self.role is not Role.MEMBER

    def sees(self, tenant_id: str) -> bool:
        """Return whether anything of this tenant may be seen."""
        return self.sees_all or tenant_id in self.tenants

    def may(self, action: Action, tenant_id: str | None = None) -> bool:
        """Return whether `action` is covered in this tenant, or on the box as a whole when None."""
        if action in ALLOWED[self.role]:
            return True
        held = None if tenant_id is None else self.tenants.get(tenant_id)
        return held is not None and action in ALLOWED_IN_TENANT[held]

    def may_somewhere(self, action: Action) -> bool:
        """Return whether `action` is covered on the box or in any tenant."""
        return self.may(action) or any(action in ALLOWED_IN_TENANT[held] for held in self.tenants.values())

    def require(self, action: Action, tenant_id: str | None = None) -> None:
        """Raise RoleNotAllowed unless `action` is covered; NotFound for a tenant that may not even be seen."""
        if tenant_id is not None and not self.sees(tenant_id):
            raise NotFound("no such tenant", param="tenant_id")
        if not self.may(action, tenant_id):
            raise self._refusal(action, tenant_id)

    def row(self, found: OwnedRow | None, action: Action, *, what: str, param: str) -> OwnedRow:
        """Return the row that a store `found` by its id (None: no such row), after a check that `action` is covered for it.

        Raises RoleNotAllowed, and NotFound in the same words for a missing row and for one that may not be seen.
        """
        if found is None:
            raise NotFound(f"no such {what}", param=param)
        self.require_row(action, found.tenant_id, what=what, param=param)
        return found

    def require_row(self, action: Action, tenant_id: str | None, *, what: str, param: str) -> None:
        """Like `require`, for a row of a tenant, or of the box when None: a caller who may not see its owner gets NotFound, "no
        such `what`"."""
        if not (self.sees_all if tenant_id is None else self.sees(tenant_id)):
            raise NotFound(f"no such {what}", param=param)
        self.require(action, tenant_id)

    def require_somewhere(self, action: Action) -> None:
        """Raise RoleNotAllowed unless `action` is covered anywhere; the caller must then narrow what it lists."""
        if not self.may_somewhere(action):
            raise self._refusal(action, None)

    def within(self, action: Action) -> frozenset[str] | None:
        """Return the ids of the tenants in which `action` is covered; None is all."""
        if self.may(action):
            return None
        return frozenset(tenant_id for tenant_id in self.tenants if self.may(action, tenant_id))

    def narrow(self, query: Select[Row], column: ColumnElement[Any], action: Action = Action.READ) -> Select[Row]:
        """Return `query` for rows of the tenants in which `action` is covered; rows of no tenant belong to the box."""
        return query.where(*self.conditions(column, action))

    def conditions(self, column: ColumnElement[Any], action: Action = Action.READ) -> Collection[ColumnElement[bool]]:
        """Return the conditions that `narrow` adds, for queries built from conditions."""
        allowed = self.within(action)
        return () if allowed is None else (column.in_(sorted(allowed)),)

    def _refusal(self, action: Action, tenant_id: str | None) -> RoleNotAllowed:
        held = self.tenants.get(tenant_id) if tenant_id is not None else None
        role = f"{held} of this tenant" if held is not None and not self.sees_all else f"{self.role}"
        return not_allowed(role, action)


WHOLE_BOX = Access(role=Role.OWNER, actor=SYSTEM)
"""The appliance itself, for sums and lists that no caller asked for."""


def access_of_key(principal: Principal, actor: Actor) -> Access:
    """Return what an API key may read of its own tenant, on the paths that accept keys for reading."""
    return Access(role=Role.MEMBER, actor=actor, tenants={principal.tenant.id: TenantRole.VIEWER})
