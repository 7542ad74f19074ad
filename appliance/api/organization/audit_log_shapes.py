"""The JSON of audit log entries for OpenAI's clients: the details of an entry are in a field named after its type.

The type is OpenAI's name for the action. Where OpenAI has none it is ours (`price.create`), so that no entry is left out.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import msgspec

from appliance.api.organization.queries import unix
from appliance.tenancy.audit_chain import AuditEntry, decode_fields

ENTRY_PREFIX = "audit_log-"
TYPE_OF = {
    "tenant.create": "project.created",
    "tenant.update": "project.updated",
    "tenant.archive": "project.archived",
    "key.create": "api_key.created",
    "key.update": "api_key.updated",
    "key.rotate": "api_key.updated",
    "key.revoke": "api_key.deleted",
    "member.create": "user.added",
    "member.change": "user.updated",
    "membership.add": "role.assignment.created",
    "membership.change": "role.assignment.created",
    "membership.remove": "role.assignment.deleted",
    "session.open": "login.succeeded",
    "session.refuse": "login.failed",
    "session.close": "logout.succeeded",
    "token.create": "tenant.admin_api_key.created",
    "token.revoke": "tenant.admin_api_key.deleted",
}
LOGIN_FAILED = "login.failed"


class AuditLogActorUserShape(msgspec.Struct, kw_only=True):
    """The signed-in member."""

    id: str | None
    email: str


class AuditLogActorSessionShape(msgspec.Struct, kw_only=True):
    """The session in which a change was made. That of a failed sign-in has no user."""

    user: AuditLogActorUserShape | None
    ip_address: str | None


class AuditLogActorServiceAccountShape(msgspec.Struct, kw_only=True):
    """The service account for which a key acts, which is the key itself."""

    id: str


class AuditLogActorApiKeyShape(msgspec.Struct, kw_only=True):
    """The key or administrator token that made a change; also the command line and the appliance itself."""

    id: str
    type: str = "service_account"
    service_account: AuditLogActorServiceAccountShape


class AuditLogActorShape(msgspec.Struct, kw_only=True):
    """Who made a change: a session or a key, depending on `type`."""

    type: str
    session: AuditLogActorSessionShape | msgspec.UnsetType = msgspec.UNSET
    api_key: AuditLogActorApiKeyShape | msgspec.UnsetType = msgspec.UNSET


class AuditLogProjectShape(msgspec.Struct, kw_only=True):
    """The project (tenant) that a change concerns."""

    id: str


class AuditLogDetailsShape(msgspec.Struct, kw_only=True):
    """The object that was changed, and the fields that were set: in `data` for a new object, else in `changes_requested`."""

    id: str
    data: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    changes_requested: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


class AuditLogLoginFailedShape(msgspec.Struct, kw_only=True):
    """Why a sign-in failed."""

    error_code: str
    error_message: str


Details: TypeAlias = AuditLogDetailsShape | msgspec.UnsetType


def _named(kind: str) -> Any:
    return msgspec.field(default=msgspec.UNSET, name=kind)


class AuditLogShape(msgspec.Struct, kw_only=True):
    """An entry of the audit log. Its details are in the field named after its `type`, also for types that OpenAI does not have,
    such as `price.create`."""

    object: str = "organization.audit_log"
    id: str
    type: str
    effective_at: int
    actor: AuditLogActorShape
    project: AuditLogProjectShape | msgspec.UnsetType = msgspec.UNSET
    project_created: Details = _named("project.created")
    project_updated: Details = _named("project.updated")
    project_archived: Details = _named("project.archived")
    api_key_created: Details = _named("api_key.created")
    api_key_updated: Details = _named("api_key.updated")
    api_key_deleted: Details = _named("api_key.deleted")
    user_added: Details = _named("user.added")
    user_updated: Details = _named("user.updated")
    role_assignment_created: Details = _named("role.assignment.created")
    role_assignment_deleted: Details = _named("role.assignment.deleted")
    login_succeeded: Details = _named("login.succeeded")
    login_failed: AuditLogLoginFailedShape | msgspec.UnsetType = _named(LOGIN_FAILED)
    logout_succeeded: Details = _named("logout.succeeded")
    tenant_admin_api_key_created: Details = _named("tenant.admin_api_key.created")
    tenant_admin_api_key_deleted: Details = _named("tenant.admin_api_key.deleted")


def audit_log_shape(entry: AuditEntry) -> AuditLogShape:
    """Return `entry` as JSON."""
    kind = TYPE_OF.get(entry.action, entry.action)
    details: dict[str, Any] = {_attribute(kind): _details(entry, kind)}
    return _shape_with(kind)(
        id=f"{ENTRY_PREFIX}{entry.id}",
        type=kind,
        effective_at=unix(entry.at),
        actor=_actor(entry),
        project=msgspec.UNSET if entry.tenant_id is None else AuditLogProjectShape(id=entry.tenant_id),
        **details,
    )


def _attribute(kind: str) -> str:
    return kind.replace(".", "_")


@cache
def _shape_with(kind: str) -> type[AuditLogShape]:
    """Return the shape of entries of this type. For a type that is not OpenAI's, it has an additional field for the details."""
    if kind in TYPE_OF.values():
        return AuditLogShape
    extended = msgspec.defstruct(
        AuditLogShape.__name__, [(_attribute(kind), Details, _named(kind))], bases=(AuditLogShape,), kw_only=True
    )
    assert issubclass(extended, AuditLogShape)
    return extended


def _details(entry: AuditEntry, kind: str) -> AuditLogDetailsShape | AuditLogLoginFailedShape:
    after = decode_fields(entry.after) or {}
    if kind == LOGIN_FAILED:
        return AuditLogLoginFailedShape(
            error_code=str(after.get("reason")), error_message=f"{entry.target_id} could not sign in"
        )
    if kind.startswith("project.") and "name" in after:
        after["title"] = after["name"]
    name = "data" if kind.endswith((".created", ".added")) else "changes_requested"
    return AuditLogDetailsShape(id=entry.target_id, **({name: after} if after else {}))


def _actor(entry: AuditEntry) -> AuditLogActorShape:
    """Return the actor: a member as a session, any other (including the command line and the appliance) as a key."""
    if entry.actor_kind == "member" or entry.action == "session.refuse":
        is_member = entry.actor_kind == "member"
        user = AuditLogActorUserShape(id=entry.actor_id, email=entry.actor_name) if is_member else None
        return AuditLogActorShape(type="session", session=AuditLogActorSessionShape(user=user, ip_address=entry.address))
    own_id = entry.actor_id or entry.actor_name
    key = AuditLogActorApiKeyShape(id=own_id, service_account=AuditLogActorServiceAccountShape(id=own_id))
    return AuditLogActorShape(type="api_key", api_key=key)
