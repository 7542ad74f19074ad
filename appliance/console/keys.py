"""API keys: the list, creation, the page of a key, rotation and revocation. A secret is shown in one response only."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import combinations
from typing import TYPE_CHECKING, Any

from litestar import get, post
from litestar.params import FromPath

from appliance.console.context import Context, ContextDependency
from appliance.console.forms import GRACE_CHOICES, Form
from appliance.console.limits import key_levels, read_limits
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.console.tenant_names import tenants_by_name
from appliance.console.urls import next_page_url
from appliance.tenancy.fields import INFERENCE_SCOPE, LIMIT_MODES, NAME_CHARS_MAX, SCOPES, UNSET, Unset
from appliance.tenancy.principals import LIMIT_NAMES, ApiKey, KeyChanges, Principal, Tenant
from appliance.tenancy.roles import Action

if TYPE_CHECKING:
    from appliance.serving.services import Services

PAGE_ROWS = 100
FIELDS = ("name", "scopes", "limit_mode", "allowed_models", "allowed_networks", "grace_s", *LIMIT_NAMES)
SCOPE_LABELS = {"inference": "run models", "usage": "read the tenant's usage"}
SCOPE_CHOICES = [
    (", ".join(chosen), " and ".join(SCOPE_LABELS[scope] for scope in chosen).capitalize())
    for size in range(1, len(SCOPES) + 1)
    for chosen in combinations(SCOPES, size)
]
CONSEQUENCES = {
    "rotate": "A key with a new secret and the same settings replaces it. When the old one expires, its requests are aborted.",
    "revoke": "Requests with this key are refused permanently. Running requests are aborted; their tokens are billed.",
}


@get("/keys")
async def list_keys(context: ContextDependency) -> Html:
    """The keys of the visible tenants: those in use; ended ones on request or if they match a search."""
    access, query = context.access, context.query
    text, ended = query.get("q", "").strip()[:NAME_CHARS_MAX], query.get("ended") == "yes"
    page = await context.services.keys.list(
        None, PAGE_ROWS, query.get("cursor"), include_ended=ended or bool(text), text=text or None, access=access
    )
    tenants = await tenants_by_name(context.services, access)
    return context.page(
        "pages/keys.html",
        part="fragments/key_list.html",
        keys=page.data,
        owners={tenant.id: tenant for tenant in tenants},
        new_key_tenants=[tenant for tenant in tenants if not tenant.archived and access.may(Action.KEYS, tenant.id)],
        may_keys=access.may_somewhere(Action.KEYS),
        sees_all=access.sees_all,
        text=text,
        ended=ended,
        next_page=next_page_url("/keys", page, q=text, ended="yes" if ended else ""),
    )


@get("/tenants/{tenant_id:str}/keys/new", guards=[needs(Action.KEYS)])
async def new_key(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """The form for a new key."""
    return _new_form(context, await context.services.tenants.get(tenant_id, access=context.access), None)


@post("/tenants/{tenant_id:str}/keys", guards=[needs(Action.KEYS)], status_code=200)
async def create_key(context: ContextDependency, tenant_id: FromPath[str]) -> Html:
    """Create a key and show its secret, or show the form again with the errors."""
    tenant = await context.services.tenants.get(tenant_id, access=context.access)
    form = await context.form()
    values = _read(form, context.services)
    if not form.errors:
        with form.refusals(FIELDS):
            key, secret = await context.services.keys.create(
                tenant_id, values["name"], KeyChanges(**values), access=context.access
            )
            return _secret(context, Principal(tenant=tenant, key=key), secret, f"Key for {tenant.name}")
    return _new_form(context, tenant, form)


@get("/keys/{key_id:str}")
async def show_key(context: ContextDependency, key_id: FromPath[str]) -> Html:
    """One key and its settings."""
    return await _key_page(context, await _get_key(context, key_id, Action.READ))


@post("/keys/{key_id:str}", guards=[needs(Action.KEYS)], status_code=200)
async def save_key(context: ContextDependency, key_id: FromPath[str]) -> Html:
    """Save name, expiry, restrictions and limits, or show the page again with the errors."""
    key = await _get_key(context, key_id, Action.KEYS)
    form = await context.form()
    # An unchanged day keeps the stored time, even if it is in the past.
    same_day = key.expires_at is not None and form.raw("expires_on") == _last_day(context.services, key)
    values = _read(form, context.services, expires_at=UNSET if same_day else None)
    if values["name"] == key.name:  # an existing name may stay even if it is invalid for new keys
        values["name"] = UNSET
    values |= {name: form.changed_names(name, getattr(key, name)) for name in ("allowed_models", "allowed_networks")}
    if not form.errors:
        with form.refusals(FIELDS):
            await context.services.keys.update(key_id, KeyChanges(**values), access=context.access)
            return context.redirect(f"/keys/{key_id}", done="key-saved")
    return await _key_page(context, key, form)


@get("/keys/{key_id:str}/rotate", guards=[needs(Action.KEYS)])
async def confirm_rotate(context: ContextDependency, key_id: FromPath[str]) -> Html:
    """Confirm a rotation and explain its consequences."""
    return _confirm(context, await _get_key(context, key_id, Action.KEYS), "rotate")


@post("/keys/{key_id:str}/rotate", guards=[needs(Action.KEYS)], status_code=200)
async def rotate_key(context: ContextDependency, key_id: FromPath[str]) -> Html:
    """Replace the key by one with a new secret and show it; both keys work during the grace period."""
    current, form = await _get_key(context, key_id, Action.KEYS), await context.form()
    tenant = await context.services.tenants.get(current.tenant_id, access=context.access)
    grace_s = form.choice("grace_s", [grace for grace, _ in GRACE_CHOICES]) if form.raw("grace_s") else "0"
    if not form.errors:
        with form.refusals(FIELDS):  # nothing may fail after the rotation: the secret cannot be shown again
            key, secret = await context.services.keys.rotate(key_id, grace_s=int(grace_s), access=context.access)
            old_until = _grace_end(context.services, current, int(grace_s))
            return _secret(context, Principal(tenant=tenant, key=key), secret, f"New secret of {key.name}", old_until)
    return _confirm(context, current, "rotate", form)


@get("/keys/{key_id:str}/revoke", guards=[needs(Action.KEYS)])
async def confirm_revoke(context: ContextDependency, key_id: FromPath[str]) -> Html:
    """Confirm a revocation and explain its consequences."""
    return _confirm(context, await _get_key(context, key_id, Action.KEYS), "revoke")


@post("/keys/{key_id:str}/revoke", guards=[needs(Action.KEYS)], status_code=200)
async def revoke_key(context: ContextDependency, key_id: FromPath[str]) -> Html:
    """Revoke the key."""
    key = await context.services.keys.revoke(key_id, access=context.access)
    return context.redirect(f"/tenants/{key.tenant_id}", done="key-revoked")


async def _get_key(context: Context, key_id: str, action: Action) -> ApiKey:
    """Return the key if the member may do `action` in its tenant. Raises NotFound, also for an invisible key."""
    return await context.services.keys.get(key_id, access=context.access, action=action)


def _read(form: Form, services: Services, expires_at: Unset | None = None) -> dict[str, Any]:
    """Parse the settings; scopes and limit mode are left unchanged if the form does not have them."""
    chosen = dict[str, Any]()
    if form.raw("scopes"):
        chosen["scopes"] = form.choice("scopes", [scopes for scopes, _ in SCOPE_CHOICES]).split(", ")
    if form.raw("limit_mode"):
        chosen["limit_mode"] = form.choice("limit_mode", LIMIT_MODES)
    return chosen | {
        "name": form.text("name"),
        "expires_at": expires_at or form.last_day("expires_on", services.clock.now(), services.reports.calendar),
        "allowed_models": form.names("allowed_models"),
        "allowed_networks": form.names("allowed_networks"),
        "limits": read_limits(form),
    }


def _new_form(context: Context, tenant: Tenant, form: Form | None) -> Html:
    title = f"New key for {tenant.name}"
    return context.sheet("fragments/key_new.html", title=title, tenant=tenant, form=form, **_choices(context.services))


def _grace_end(services: Services, key: ApiKey, grace_s: int) -> datetime | None:
    """Return the time until which the replaced key works, None if it has ended."""
    end = services.clock.now() + timedelta(seconds=grace_s)
    return None if grace_s == 0 else min(end, key.expires_at or end)


def _secret(context: Context, principal: Principal, secret: str, title: str, old_until: datetime | None = None) -> Html:
    return context.sheet(
        "fragments/key_secret.html",
        title=title,
        key=principal.key,
        runs_models=INFERENCE_SCOPE in principal.key.scopes,
        secret=secret,
        old_until=old_until,
        **context.console.example(principal.may_use),
    )


def _confirm(context: Context, key: ApiKey, verb: str, form: Form | None = None) -> Html:
    return context.sheet(
        "fragments/key_confirm.html",
        title=f"{verb.capitalize()} {key.name}",
        key=key,
        verb=verb,
        consequence=CONSEQUENCES[verb],
        graces=GRACE_CHOICES,
        form=form,
    )


async def _key_page(context: Context, key: ApiKey, form: Form | None = None) -> Html:
    access = context.access
    tenant = await context.services.tenants.get(key.tenant_id, access=access)
    return context.page(
        "pages/key.html",
        key=key,
        tenant=tenant,
        levels=await key_levels(context.services, tenant, key, access=access),
        form=form,
        scopes_of=SCOPE_LABELS,
        last_day=_last_day(context.services, key),
        **_choices(context.services),
    )


def _choices(services: Services) -> dict[str, Any]:
    return {"scope_choices": SCOPE_CHOICES, "modes": LIMIT_MODES, "zone": services.reports.calendar.time_zone}


def _last_day(services: Services, key: ApiKey) -> str:
    """Return the last day on which the key is valid, in the billing time zone, for the form; empty if it never expires."""
    return "" if key.expires_at is None else str(services.reports.calendar.day_of(key.expires_at))
