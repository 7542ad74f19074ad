"""OpenAI's organization API, projects and their API keys. A project is a tenant. The rules are in the tenancy layer."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import msgspec
from litestar import delete, get, post
from litestar.params import FromPath

from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body
from appliance.api.connection_services import services_of
from appliance.api.field_types import Name, items, one_of, within
from appliance.api.organization.queries import (
    DeletedShape,
    ListShape,
    after_cursor,
    list_shape,
    optional_unix,
    page_limit,
    unix,
)
from appliance.api.queries import AdminRequest, choice, flag
from appliance.base.errors import NotFound, UnsupportedParameter
from appliance.tenancy.access import Access
from appliance.tenancy.fields import LIST_ITEMS_MAX, SCOPES, UNSET, check_whole
from appliance.tenancy.principals import ApiKey, KeyChanges, Tenant, TenantChanges
from appliance.tenancy.roles import Action

ACCESSES = ("active", "inactive", "any")
EXPIRES_IN_S_MAX = 10 * 365 * 24 * 3600


class ProjectBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The project (tenant) to create, or its new name."""

    name: Name
    external_key_id: str | None = None
    geography: str | None = None
    residency: dict[str, str] | None = None


class KeyPatchBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a key to change. Fields left out keep their values."""

    expires_in_seconds: Annotated[int, within(1, EXPIRES_IN_S_MAX)] | None = None
    scopes: Annotated[list[Annotated[str, one_of(SCOPES)]], items(0, LIST_ITEMS_MAX)] | None = None


class ProjectShape(msgspec.Struct, kw_only=True):
    """A project, which is a tenant. A suspended tenant is reported as active."""

    id: str
    name: str
    created_at: int
    archived_at: int | None
    status: str
    object: str = "organization.project"


class ServiceAccountShape(msgspec.Struct, kw_only=True):
    """The service account for which a key acts, which is its project (tenant)."""

    id: str
    name: str
    created_at: int
    role: str = "member"


class KeyOwnerShape(msgspec.Struct, kw_only=True):
    """The owner of a key. Keys belong to projects (tenants), not to people."""

    service_account: ServiceAccountShape
    type: str = "service_account"


class ProjectKeyShape(msgspec.Struct, kw_only=True):
    """An API key without its secret."""

    id: str
    name: str
    redacted_value: str
    created_at: int
    last_used_at: int | None
    expires_at: int | None
    owner: KeyOwnerShape
    owner_project_access: str
    object: str = "organization.project.api_key"


@get("/projects", summary="List projects (tenants)", opt={"query": ("limit", "after", "include_archived")})
async def list_projects(request: AdminRequest) -> ListShape[ProjectShape]:
    """Return tenants in the order they were created."""
    access = await authenticate_administrator(request, Action.READ)
    page = await services_of(request).tenants.list(
        page_limit(request), after_cursor(request, "tenants"), include_archived=flag(request, "include_archived"), access=access
    )
    return list_shape(page.data, project_shape, lambda project: project.id, has_more=page.has_more)


@post("/projects", status_code=200, summary="Create a project (tenant)", opt={"body": ProjectBody, "errors": (409,)})
async def create_project(request: AdminRequest) -> ProjectShape:
    """Create a tenant with the default tier and no limits."""
    access = await authenticate_administrator(request, Action.WRITE)
    body = _project_body(await request.body())
    return project_shape(await services_of(request).tenants.create(name=body.name, access=access))


@get("/projects/{project_id:str}", summary="Retrieve a project (tenant)")
async def retrieve_project(request: AdminRequest, project_id: FromPath[str]) -> ProjectShape:
    """Return one tenant, archived or not."""
    access = await authenticate_administrator(request, Action.READ, project_id)
    return project_shape(await services_of(request).tenants.get(project_id, access=access))


@post(
    "/projects/{project_id:str}",
    status_code=200,
    summary="Rename a project (tenant)",
    opt={"body": ProjectBody, "errors": (409,)},
)
async def change_project(request: AdminRequest, project_id: FromPath[str]) -> ProjectShape:
    """Change the name of a tenant."""
    access = await authenticate_administrator(request, Action.WRITE, project_id)
    changes = TenantChanges(name=_project_body(await request.body()).name)
    return project_shape(await services_of(request).tenants.update(project_id, changes, access=access))


@post("/projects/{project_id:str}/archive", status_code=200, summary="Archive a project (tenant)")
async def archive_project(request: AdminRequest, project_id: FromPath[str]) -> ProjectShape:
    """Archive a tenant permanently: its keys are refused from now on; usage and invoices are kept."""
    access = await authenticate_administrator(request, Action.WRITE, project_id)
    return project_shape(await services_of(request).tenants.archive(project_id, access=access))


@get(
    "/projects/{project_id:str}/api_keys",
    summary="List a project's keys",
    opt={"query": ("limit", "after", "owner_project_access")},
)
async def list_project_keys(request: AdminRequest, project_id: FromPath[str]) -> ListShape[ProjectKeyShape]:
    """Return the keys of a tenant that are not revoked."""
    access = await authenticate_administrator(request, Action.READ, project_id)
    services = services_of(request)
    tenant = await services.tenants.get(project_id, access=access)
    project_access = choice(request, "owner_project_access", ACCESSES, "any")
    limit = page_limit(request)
    if project_access not in ("any", _project_access(tenant)):
        return ListShape(data=[], first_id=None, last_id=None, has_more=False)
    page = await services.keys.list(tenant.id, limit, after_cursor(request, "keys"), access=access, include_revoked=False)
    return list_shape(page.data, lambda key: key_shape(key, tenant), lambda key: key.id, has_more=page.has_more)


@get("/projects/{project_id:str}/api_keys/{key_id:str}", summary="Retrieve a project's key")
async def retrieve_project_key(request: AdminRequest, project_id: FromPath[str], key_id: FromPath[str]) -> ProjectKeyShape:
    """Return one key that is not revoked."""
    access = await authenticate_administrator(request, Action.READ, project_id)
    key = await _key(request, project_id, key_id, access)
    return key_shape(key, await services_of(request).tenants.get(project_id, access=access))


@post(
    "/projects/{project_id:str}/api_keys/{key_id:str}",
    status_code=200,
    summary="Change a project's key",
    opt={"body": KeyPatchBody, "errors": (409,)},
)
async def change_project_key(request: AdminRequest, project_id: FromPath[str], key_id: FromPath[str]) -> ProjectKeyShape:
    """Change a key's expiry and scopes."""
    access = await authenticate_administrator(request, Action.KEYS, project_id)
    body = decode_body(await request.body(), KeyPatchBody)
    services = services_of(request)
    key = await _key(request, project_id, key_id, access)
    changes = KeyChanges(
        scopes=UNSET if body.scopes is None else body.scopes or SCOPES,
        expires_at=UNSET if body.expires_in_seconds is None else services.clock.now() + _lifetime(body.expires_in_seconds),
    )
    changed = await services.keys.update(key.id, changes, access=access)
    return key_shape(changed, await services.tenants.get(project_id, access=access))


@delete("/projects/{project_id:str}/api_keys/{key_id:str}", status_code=200, summary="Revoke a project's key")
async def delete_project_key(request: AdminRequest, project_id: FromPath[str], key_id: FromPath[str]) -> DeletedShape:
    """Revoke a key at once and permanently, and stop its running requests."""
    access = await authenticate_administrator(request, Action.KEYS, project_id)
    key = await _key(request, project_id, key_id, access)
    await services_of(request).keys.revoke(key.id, access=access)
    return DeletedShape(id=key.id, object="organization.project.api_key.deleted")


def project_shape(tenant: Tenant) -> ProjectShape:
    """Return `tenant` as a project."""
    return ProjectShape(
        id=tenant.id,
        name=tenant.name,
        created_at=unix(tenant.created_at),
        archived_at=optional_unix(tenant.archived_at),
        status="archived" if tenant.archived else "active",
    )


def key_shape(key: ApiKey, tenant: Tenant) -> ProjectKeyShape:
    """Return `key` of `tenant` as a project's key."""
    owner = ServiceAccountShape(id=tenant.id, name=tenant.name, created_at=unix(tenant.created_at))
    return ProjectKeyShape(
        id=key.id,
        name=key.name,
        redacted_value=f"{key.prefix}_…",
        created_at=unix(key.created_at),
        last_used_at=optional_unix(key.last_used_at),
        expires_at=optional_unix(key.expires_at),
        owner=KeyOwnerShape(service_account=owner),
        owner_project_access=_project_access(tenant),
    )


async def _key(request: AdminRequest, project_id: str, key_id: str, access: Access) -> ApiKey:
    """Return a key of this tenant that is not revoked. Raises NotFound, also for another tenant's key."""
    key = await services_of(request).keys.get(key_id, access=access)
    if key.tenant_id != project_id or key.revoked_at is not None:
        raise NotFound("no such key", param="key_id")
    return key


def _project_access(tenant: Tenant) -> str:
    return "inactive" if tenant.archived else "active"


def _lifetime(seconds: int) -> timedelta:
    return timedelta(seconds=check_whole(seconds, "expires_in_seconds", 1, EXPIRES_IN_S_MAX))


def _project_body(body: bytes) -> ProjectBody:
    decoded = decode_body(body, ProjectBody)
    for name in ("external_key_id", "geography", "residency"):
        if getattr(decoded, name) is not None:
            raise UnsupportedParameter(f"{name} is not supported: all data is on this machine", param=name)
    return decoded
