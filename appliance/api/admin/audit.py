"""`/admin/v1/audit`: the audit log, newest first. Entries cannot be changed or removed."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import get

from appliance.api.auth import authenticate_administrator
from appliance.api.connection_services import services_of
from appliance.api.queries import PAGING, AdminRequest, paging, timestamp, values
from appliance.api.shapes import PageShape, Shape, page_shape
from appliance.tenancy.audit import AuditFilter
from appliance.tenancy.audit_chain import AuditEntry, decode_fields, rfc3339_micros
from appliance.tenancy.roles import Action

REPEATABLE = ("actor", "action", "target", "tenant_id")
QUERY = (*PAGING, *REPEATABLE, "start", "end")


class AuditActorShape(msgspec.Struct, kw_only=True):
    """Who made a change: a member, an administrator token, the command line, an API key, or the appliance itself."""

    kind: str
    id: str | None
    name: str


class AuditTargetShape(msgspec.Struct, kw_only=True):
    """The object that was changed."""

    kind: str
    id: str


class AuditEntryShape(Shape, kw_only=True):
    """An entry of the audit log. Its `hash` covers the entry and the previous entry's hash, so that the log is a hash chain."""

    id: str
    at: str
    actor: AuditActorShape
    action: str
    target: AuditTargetShape
    tenant_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str | None
    address: str | None
    previous_hash: str
    hash: str


@get("/audit", summary="List the audit log", opt={"query": QUERY, "repeatable": REPEATABLE})
async def list_audit(request: AdminRequest) -> PageShape[AuditEntryShape]:
    """Return entries of the audit log, newest first. A tenant's manager sees the entries of that tenant only."""
    access = await authenticate_administrator(request, Action.AUDIT)
    filters = AuditFilter(
        actors=values(request, "actor"),
        actions=values(request, "action"),
        targets=values(request, "target"),
        tenant_ids=values(request, "tenant_id"),
        start=timestamp(request, "start"),
        end=timestamp(request, "end"),
    )
    page = await services_of(request).audit.page(*paging(request), filters, access=access)
    return page_shape(page, audit_entry_shape)


def audit_entry_shape(entry: AuditEntry) -> AuditEntryShape:
    """Return `entry` as JSON."""
    return AuditEntryShape.of(
        entry,
        id=str(entry.id),
        at=rfc3339_micros(entry.at),
        actor=AuditActorShape(kind=entry.actor_kind, id=entry.actor_id, name=entry.actor_name),
        target=AuditTargetShape(kind=entry.target_kind, id=entry.target_id),
        before=decode_fields(entry.before),
        after=decode_fields(entry.after),
    )
