"""`/admin/v1/tenants` and their keys. This module handles JSON; the rules are in the tenancy layer."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import delete, get, patch, post
from litestar.params import FromPath

from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import OMITTED, Omittable, decode_body, given_fields
from appliance.api.connection_services import services_of
from appliance.api.field_types import (
    MODELS_LIMITED,
    AlertPercents,
    Country,
    Currency,
    Limit,
    LimitMode,
    Lines,
    Name,
    Names,
    Networks,
    Scopes,
    TierName,
    Timestamp,
    Weight,
    email_address,
    within,
)
from appliance.api.queries import PAGING, AdminRequest, flag, paging, parse_timestamp
from appliance.api.shapes import (
    KeyShape,
    NewKeyShape,
    PageShape,
    TenantShape,
    key_shape,
    new_key_shape,
    page_shape,
    tenant_shape,
)
from appliance.tenancy.fields import DEFAULT_SCOPES, NAME_CHARS_MAX
from appliance.tenancy.keys import GRACE_S_MAX
from appliance.tenancy.principals import KeyChanges, TenantChanges
from appliance.tenancy.roles import Action


class LimitsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Limits to set, each 0 to 10¹⁵. In an update, a limit left out keeps its value; null removes it."""

    tokens_per_minute: Limit | Omittable | None = OMITTED
    requests_per_minute: Limit | Omittable | None = OMITTED
    concurrent_requests: Limit | Omittable | None = OMITTED
    tokens_per_day: Limit | Omittable | None = OMITTED
    monthly_budget: Limit | Omittable | None = OMITTED


LimitsByModel = Annotated[dict[str, LimitsBody], MODELS_LIMITED]


class BillingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The buyer named on the tenant's invoices."""

    name: Name | None = None
    address: Lines | None = None
    country: Country | None = None
    email: Annotated[str, email_address(NAME_CHARS_MAX)] | None = None
    tax_id: Name | None = None
    reference: Name | None = None


class NewTenantBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tenant to create."""

    name: Name
    tier: TierName = "standard"
    weight: Weight = 1
    limits: LimitsBody | None = None
    model_limits: LimitsByModel | None = None
    limit_mode: LimitMode = "enforce"
    cut_at_budget: bool = False
    currency: Currency | None = None
    billing: BillingBody | None = None
    alert_percents: AlertPercents | None = None
    allowed_models: Names | None = None
    suspended: bool = False


class TenantPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a tenant to change. Fields left out keep their values."""

    name: Name | Omittable = OMITTED
    tier: TierName | Omittable = OMITTED
    weight: Weight | Omittable = OMITTED
    limits: LimitsBody | Omittable = OMITTED
    model_limits: LimitsByModel | Omittable | None = OMITTED
    limit_mode: LimitMode | Omittable = OMITTED
    cut_at_budget: bool | Omittable = OMITTED
    currency: Currency | Omittable | None = OMITTED
    billing: BillingBody | Omittable | None = OMITTED
    alert_percents: AlertPercents | Omittable | None = OMITTED
    allowed_models: Names | Omittable | None = OMITTED
    suspended: bool | Omittable = OMITTED


class NewKeyBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A key to create."""

    name: Name
    scopes: Scopes = msgspec.field(default_factory=lambda: list(DEFAULT_SCOPES))
    expires_at: Timestamp | None = None
    allowed_models: Names | None = None
    allowed_networks: Networks | None = None
    limits: LimitsBody | None = None
    model_limits: LimitsByModel | None = None
    limit_mode: LimitMode = "enforce"


class KeyPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a key to change. Fields left out keep their values."""

    name: Name | Omittable = OMITTED
    scopes: Scopes | Omittable = OMITTED
    expires_at: Timestamp | Omittable | None = OMITTED
    allowed_models: Names | Omittable | None = OMITTED
    allowed_networks: Networks | Omittable | None = OMITTED
    limits: LimitsBody | Omittable = OMITTED
    model_limits: LimitsByModel | Omittable | None = OMITTED
    limit_mode: LimitMode | Omittable = OMITTED


class RotationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to rotate a key. The body may be left out."""

    grace_s: Annotated[int, within(0, GRACE_S_MAX)] = 0


@get("/tenants", summary="List tenants", opt={"query": (*PAGING, "include_archived")})
async def list_tenants(request: AdminRequest) -> PageShape[TenantShape]:
    """Return the tenants that the caller may see, in the order they were created."""
    access = await authenticate_administrator(request, Action.READ)
    archived = flag(request, "include_archived")
    page = await services_of(request).tenants.list(*paging(request), include_archived=archived, access=access)
    return page_shape(page, tenant_shape)


@post("/tenants", summary="Create a tenant", opt={"body": NewTenantBody, "errors": (409,)})
async def create_tenant(request: AdminRequest) -> TenantShape:
    """Create a tenant and return it."""
    access = await authenticate_administrator(request, Action.WRITE)
    body = decode_body(await request.body(), NewTenantBody)
    terms = TenantChanges(**_changes(body))
    return tenant_shape(await services_of(request).tenants.create(body.name, terms, access=access))


@get("/tenants/{tenant_id:str}", summary="Retrieve a tenant")
async def retrieve_tenant(request: AdminRequest, tenant_id: FromPath[str]) -> TenantShape:
    """Return one tenant, archived or not."""
    access = await authenticate_administrator(request, Action.READ, tenant_id)
    return tenant_shape(await services_of(request).tenants.get(tenant_id, access=access))


@patch("/tenants/{tenant_id:str}", summary="Change a tenant", opt={"body": TenantPatch, "errors": (409,)})
async def change_tenant(request: AdminRequest, tenant_id: FromPath[str]) -> TenantShape:
    """Change the given fields. Changes apply at once; changed limits also apply to running and waiting requests."""
    access = await authenticate_administrator(request, Action.WRITE, tenant_id)
    body = decode_body(await request.body(), TenantPatch)
    services = services_of(request)
    return tenant_shape(await services.tenants.update(tenant_id, TenantChanges(**_changes(body)), access=access))


@delete("/tenants/{tenant_id:str}", status_code=200, summary="Archive a tenant")
async def archive_tenant(request: AdminRequest, tenant_id: FromPath[str]) -> TenantShape:
    """Archive a tenant permanently: its keys are refused from now on; usage and invoices are kept."""
    access = await authenticate_administrator(request, Action.WRITE, tenant_id)
    return tenant_shape(await services_of(request).tenants.archive(tenant_id, access=access))


@get("/tenants/{tenant_id:str}/keys", summary="List a tenant's keys", opt={"query": PAGING})
async def list_keys(request: AdminRequest, tenant_id: FromPath[str]) -> PageShape[KeyShape]:
    """Return the keys of a tenant, including revoked ones, without their secrets."""
    access = await authenticate_administrator(request, Action.READ, tenant_id)
    services = services_of(request)
    tenant = await services.tenants.get(tenant_id, access=access)
    return page_shape(await services.keys.list(tenant.id, *paging(request), access=access), key_shape)


@post("/tenants/{tenant_id:str}/keys", summary="Create a key", opt={"body": NewKeyBody, "errors": (409,)})
async def create_key(request: AdminRequest, tenant_id: FromPath[str]) -> NewKeyShape:
    """Create a key. Its secret, `key`, is returned only in this response."""
    access = await authenticate_administrator(request, Action.KEYS, tenant_id)
    body = decode_body(await request.body(), NewKeyBody)
    terms = KeyChanges(**_changes(body))
    key, secret = await services_of(request).keys.create(tenant_id, body.name, terms, access=access)
    return new_key_shape(key, secret)


@get("/keys/{key_id:str}", summary="Retrieve a key")
async def retrieve_key(request: AdminRequest, key_id: FromPath[str]) -> KeyShape:
    """Return one key without its secret."""
    access = await authenticate_administrator(request, Action.READ)
    return key_shape(await services_of(request).keys.get(key_id, access=access))


@post(
    "/keys/{key_id:str}/rotate",
    status_code=200,
    summary="Rotate a key",
    opt={"body": RotationBody, "optional_body": True, "errors": (409,)},
)
async def rotate_key(request: AdminRequest, key_id: FromPath[str]) -> NewKeyShape:
    """Replace a key with one that has the same rights and a new secret. The old secret works until the grace period ends."""
    access = await authenticate_administrator(request, Action.KEYS)
    body = decode_body(await request.body() or b"{}", RotationBody)
    key, secret = await services_of(request).keys.rotate(key_id, grace_s=body.grace_s, access=access)
    return new_key_shape(key, secret)


@patch("/keys/{key_id:str}", summary="Change a key", opt={"body": KeyPatch, "errors": (409,)})
async def change_key(request: AdminRequest, key_id: FromPath[str]) -> KeyShape:
    """Change the given fields. Changes apply at once."""
    access = await authenticate_administrator(request, Action.KEYS)
    body = decode_body(await request.body(), KeyPatch)
    return key_shape(await services_of(request).keys.update(key_id, KeyChanges(**_changes(body)), access=access))


@delete("/keys/{key_id:str}", status_code=200, summary="Revoke a key")
async def revoke_key(request: AdminRequest, key_id: FromPath[str]) -> KeyShape:
    """Revoke a key at once and permanently, and stop its running requests."""
    access = await authenticate_administrator(request, Action.KEYS)
    return key_shape(await services_of(request).keys.revoke(key_id, access=access))


def _changes(body: NewTenantBody | TenantPatch | NewKeyBody | KeyPatch) -> dict[str, Any]:
    """Return the fields that a body contains, in the form that the tenancy layer takes."""
    fields = given_fields(body)
    if (limits := fields.pop("limits", None)) is not None:
        fields["limits"] = given_fields(limits)
    if fields.get("model_limits") is not None:
        fields["model_limits"] = {model: given_fields(limits) for model, limits in fields["model_limits"].items()}
    if fields.get("billing") is not None:
        fields["billing"] = msgspec.structs.asdict(fields["billing"])
    if fields.get("expires_at") is not None:
        fields["expires_at"] = parse_timestamp(fields["expires_at"], "expires_at")
    return fields
