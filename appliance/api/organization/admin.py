"""OpenAI's organization API, audit log and admin API keys. An admin key is an administrator token."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from litestar import delete, get, post
from litestar.params import FromPath

from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body
from appliance.api.connection_services import services_of
from appliance.api.field_types import Name
from appliance.api.organization.audit_log_shapes import ENTRY_PREFIX, TYPE_OF, AuditLogShape, audit_log_shape
from appliance.api.organization.queries import SECONDS_MAX, DeletedShape, ListShape, after_cursor, list_shape, page_limit, unix
from appliance.api.queries import ORDERS, AdminRequest, both_spellings, choice, integer, values
from appliance.base.digits import whole_number
from appliance.base.errors import InvalidValue, NotFound, UnsupportedParameter
from appliance.tenancy.admin_tokens import AdminToken
from appliance.tenancy.audit import AuditFilter
from appliance.tenancy.pages import encode_cursor
from appliance.tenancy.roles import Action, Role

ENTRY_ID_MAX = 2**63 - 1
BOUNDS = {"gte": (0, "start"), "gt": (1, "start"), "lt": (0, "end"), "lte": (1, "end")}  # seconds to add; sets `start` or `end`
AUDIT_LISTS = both_spellings("actor_emails", "actor_ids", "event_types", "project_ids", "resource_ids")
AUDIT_PARAMETERS = (
    "limit",
    "after",
    "before",
    "tenant_only",
    *AUDIT_LISTS,
    *(f"effective_at[{bound}]" for bound in BOUNDS),
)
AUDIT_OPTIONS = {"query": AUDIT_PARAMETERS, "repeatable": AUDIT_LISTS}


class NewAdminKeyBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An admin key (an administrator token with the role `owner`) to create."""

    name: Name
    expires_in_seconds: int | None = None


class AdminKeyOwnerShape(msgspec.Struct, kw_only=True):
    """The owner of an admin key, which is the key itself."""

    id: str
    name: str
    created_at: int
    role: str
    type: str = "service_account"
    object: str = "organization.service_account"


class AdminKeyShape(msgspec.Struct, kw_only=True):
    """An admin key (an administrator token) without its secret."""

    id: str
    name: str
    redacted_value: str
    created_at: int
    owner: AdminKeyOwnerShape
    last_used_at: int | None = None
    expires_at: int | None = None
    object: str = "organization.admin_api_key"


class NewAdminKeyShape(AdminKeyShape, kw_only=True):
    """A new admin key with its secret, which is returned only in this response."""

    value: str


@get("/audit_logs", summary="List the audit log in OpenAI's form", opt=AUDIT_OPTIONS)
async def list_audit_logs(request: AdminRequest) -> ListShape[AuditLogShape]:
    """Return entries of the audit log, newest first. The details of an entry are in a field named after its `type`.

    To page to older entries, pass the last id of a page as `after`. To page to newer ones, pass the first id of a page as
    `before` until a page is empty. With both, pages run from `after` to `before`, and `has_more` refers to the entries up to
    `before`.
    """
    access = await authenticate_administrator(request, Action.AUDIT)
    if "tenant_only" in request.query_params:
        raise UnsupportedParameter("tenant_only is not supported: filter with project_ids instead", param="tenant_only")
    after_id, before_id = (_entry_id(request, name) for name in ("after", "before"))
    page = await services_of(request).audit.page(
        page_limit(request),
        None if after_id is None else encode_cursor("audit", [after_id]),
        _filter(request),
        before=before_id,
        access=access,
    )
    return list_shape(page.data, audit_log_shape, lambda entry: entry.id, has_more=page.has_more)


@get("/admin_api_keys", summary="List admin keys", opt={"query": ("limit", "after", "order")})
async def list_admin_keys(request: AdminRequest) -> ListShape[AdminKeyShape]:
    """Return the administrator tokens that are not revoked, in the order they were created."""
    await authenticate_administrator(request, Action.MEMBERS)
    page = await services_of(request).admin_tokens.list(
        page_limit(request),
        after_cursor(request, "admin_tokens"),
        include_revoked=False,
        newest_first=choice(request, "order", ORDERS, "asc") == "desc",
    )
    return list_shape(page.data, _admin_key_shape, lambda key: key.id, has_more=page.has_more)


@post("/admin_api_keys", status_code=200, summary="Create an admin key", opt={"body": NewAdminKeyBody})
async def create_admin_key(request: AdminRequest) -> NewAdminKeyShape:
    """Create an administrator token with the role `owner`. Its secret, `value`, is returned only in this response."""
    await authenticate_administrator(request, Action.MEMBERS)
    body = decode_body(await request.body(), NewAdminKeyBody)
    if body.expires_in_seconds is not None:
        raise UnsupportedParameter(
            "expires_in_seconds: administrator tokens do not expire; revoke them instead", param="expires_in_seconds"
        )
    token, secret = await services_of(request).admin_tokens.create(body.name, Role.OWNER)
    return NewAdminKeyShape(**msgspec.structs.asdict(_admin_key_shape(token)), value=secret)


@get("/admin_api_keys/{key_id:str}", summary="Retrieve an admin key")
async def retrieve_admin_key(request: AdminRequest, key_id: FromPath[str]) -> AdminKeyShape:
    """Return one administrator token that is not revoked."""
    await authenticate_administrator(request, Action.MEMBERS)
    return _admin_key_shape(await _token(request, key_id))


@delete("/admin_api_keys/{key_id:str}", status_code=200, summary="Revoke an admin key")
async def delete_admin_key(request: AdminRequest, key_id: FromPath[str]) -> DeletedShape:
    """Revoke an administrator token at once and permanently."""
    await authenticate_administrator(request, Action.MEMBERS)
    token = await services_of(request).admin_tokens.revoke((await _token(request, key_id)).id)
    return DeletedShape(id=token.id, object="organization.admin_api_key.deleted")


def _filter(request: AdminRequest) -> AuditFilter:
    types = values(request, "event_types")
    period = _period(request)
    return AuditFilter(
        actors=values(request, "actor_ids"),
        actor_names=values(request, "actor_emails"),
        actions=None if types is None else _actions(types),
        targets=values(request, "resource_ids"),
        tenant_ids=values(request, "project_ids"),
        start=period.get("start"),
        end=period.get("end"),
    )


def _actions(types: frozenset[str]) -> frozenset[str]:
    """Return our actions for OpenAI's event `types`. Types that are not OpenAI's are actions already."""
    actions = frozenset(action for action, event_type in TYPE_OF.items() if event_type in types)
    return actions | (types - frozenset(TYPE_OF.values()))


def _period(request: AdminRequest) -> dict[str, datetime]:
    """Return `start` and `end` from `effective_at`, which compares whole seconds. Of two bounds, the narrower one counts."""
    period: dict[str, datetime] = {}
    for bound, (step_s, name) in BOUNDS.items():
        value = integer(request, f"effective_at[{bound}]", 0, SECONDS_MAX - 1)
        if value is None:
            continue
        at = datetime.fromtimestamp(value + step_s, UTC)
        narrower = max if name == "start" else min
        period[name] = narrower(period.get(name, at), at)
    return period


def _entry_id(request: AdminRequest, name: str) -> int | None:
    """Return the number of the entry that the parameter `name` refers to, or None if it is missing. Raises InvalidValue."""
    text = request.query_params.get(name)
    if text is None:
        return None
    number = whole_number(text.removeprefix(ENTRY_PREFIX), ENTRY_ID_MAX)
    if number is None or not text.startswith(ENTRY_PREFIX):
        raise InvalidValue(f"invalid {name} for this list", param=name)
    return number


async def _token(request: AdminRequest, key_id: str) -> AdminToken:
    token = await services_of(request).admin_tokens.get(key_id)
    if token.revoked_at is not None:
        raise NotFound("no such administrator token", param="key_id")
    return token


def _admin_key_shape(token: AdminToken) -> AdminKeyShape:
    created_at = unix(token.created_at)
    owner = AdminKeyOwnerShape(id=token.id, name=token.name, created_at=created_at, role=token.role)
    return AdminKeyShape(id=token.id, name=token.name, redacted_value="gha_…", created_at=created_at, owner=owner)
