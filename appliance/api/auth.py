"""Authenticates the caller: a tenant's program by API key, an administrator or member by token or console session.

The caller becomes the actor of the request. Its `Access` says what it may see and do, and nothing else restricts its reads.
Knows no path and no table.
"""

from __future__ import annotations

import dataclasses
import hmac
import ipaddress
from typing import Any
from urllib.parse import unquote

import structlog
from litestar import Request

from appliance.api.connection_services import services_of
from appliance.api.exchange import exchange_of
from appliance.api.queries import Connection, check_query
from appliance.api.rate_limit_headers import rate_limit_headers
from appliance.base.acting import OPERATOR_HEADER, Actor, ActorKind, act_as, current_actor
from appliance.base.errors import InvalidApiKey, PasswordChangeNeeded, RoleNotAllowed
from appliance.tenancy.access import Access, access_of_key
from appliance.tenancy.browser_rules import (
    CSRF_HEADER,
    SAFE_METHODS,
    is_csrf_token_of,
    is_from_own_site,
    is_secure,
    session_cookie_name,
)
from appliance.tenancy.fields import INFERENCE_SCOPE, USAGE_SCOPE
from appliance.tenancy.principals import Principal
from appliance.tenancy.roles import Action, Role
from appliance.tenancy.secrets import ADMIN_PREFIX, api_key_prefix
from appliance.tenancy.sessions import Session

PROXY_HEADERS = ("x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-real-ip", "forwarded", "via")
OPERATOR_CHARS_MAX = 200


async def authenticate_tenant(request: Request[Any, Any, Any]) -> Principal:
    """Return the principal of the key in `Authorization: Bearer` or `x-api-key`, and add rate limit headers to the response."""
    services = services_of(request)
    secret = _bearer(request) or request.headers.get("x-api-key")
    if not secret:
        raise InvalidApiKey("no API key was sent: use the header Authorization: Bearer gh_...")
    if secret.startswith(ADMIN_PREFIX):
        raise InvalidApiKey("this is an administrator token, for /admin/v1; programs send an API key, gh_...")
    principal = await services.keys.authenticate(secret, client_address(request))
    principal.check_scope(INFERENCE_SCOPE)
    act_as(_actor("key", principal.key.prefix, principal.key.id))
    structlog.contextvars.bind_contextvars(tenant_id=principal.tenant.id, key_id=principal.key.id)
    exchange = exchange_of(request)
    exchange.header_sources.append(lambda: rate_limit_headers(services.admission.snapshot(principal, exchange.model)))
    exchange.header_sources.append(lambda: {"openai-processing-ms": str(exchange.elapsed_ms)})
    return principal


async def authenticate_administrator(connection: Connection, action: Action, tenant_id: str | None = None) -> Access:
    """Return the caller's access after checking that it permits `action`: in the tenant, or anywhere if `tenant_id` is None.

    A handler without a tenant in its path must filter its list by the access, or `require` the action for the tenant of the row
    that it finds. Raises InvalidApiKey, RoleNotAllowed, NotFound for a tenant that the caller may not see, and what
    `check_query` raises.

    A browser session may write only with its CSRF token, and never from another site.
    """
    access = await _authenticate(connection)
    if tenant_id is None:
        access.require_somewhere(action)
    else:
        access.require(action, tenant_id)
    check_query(connection)
    return access


async def authenticate_anybody(connection: Connection) -> Access:
    """Return the access of any authenticated caller, however little it permits. Raises InvalidApiKey and as `check_query`."""
    access = await _authenticate(connection)
    check_query(connection)
    return access


async def authenticate_reader(connection: Connection) -> Access:
    """Return the caller's access, like `authenticate_administrator` with `Action.READ`.

    Also accepts a tenant's API key with the scope `usage`, which may read its own tenant's data.
    """
    secret = _bearer(connection) or connection.headers.get("x-api-key")
    if not secret or api_key_prefix(secret) is None:
        return await authenticate_administrator(connection, Action.READ)
    principal = await services_of(connection).keys.authenticate(secret, client_address(connection))
    principal.check_scope(USAGE_SCOPE)
    access = access_of_key(principal, _actor("key", principal.key.prefix, principal.key.id))
    act_as(access.actor)
    structlog.contextvars.bind_contextvars(tenant_id=principal.tenant.id, key_id=principal.key.id)
    access.require_somewhere(Action.READ)
    check_query(connection)
    return access


async def _authenticate(connection: Connection) -> Access:
    secret = _bearer(connection)
    access = await _access_of_token(connection, secret) if secret else await _access_of_session(connection)
    act_as(access.actor)
    structlog.contextvars.bind_contextvars(administrator=access.actor.name)
    return access


async def _access_of_token(connection: Connection, secret: str) -> Access:
    services = services_of(connection)
    if hmac.compare_digest(secret.encode(), services.control_token.encode()):
        return Access(role=Role.OWNER, actor=_actor("cli", _operator(connection)))
    if api_key_prefix(secret) is not None:
        raise InvalidApiKey("this is a tenant's API key, for /v1; this path needs an administrator token, gha_...")
    token = await services.admin_tokens.authenticate(secret, client_address(connection))
    return Access(role=token.role, actor=_actor("token", token.name, token.id))


def _operator(connection: Connection) -> str:
    """Return the user name that our command line sent. Only for requests with the control token: others could forge it."""
    return unquote(connection.headers.get(OPERATOR_HEADER, ""))[:OPERATOR_CHARS_MAX].strip() or "command line"


def _actor(kind: ActorKind, name: str, id_: str | None = None) -> Actor:
    """Return the actor of this request, with the request id and address that are already set."""
    return dataclasses.replace(current_actor(), kind=kind, name=name, id=id_)


def is_from_this_machine(connection: Connection) -> bool:
    """Return whether the caller runs on this machine. Requests through a proxy do not count: they may come from anywhere."""
    if any(header in connection.headers for header in PROXY_HEADERS):
        return False
    try:
        address = ipaddress.ip_address(client_address(connection))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


async def session_of(connection: Connection) -> Session | None:
    """Return the console session of the browser's cookie; None if a token was sent or nobody is signed in."""
    cookie = None if _bearer(connection) else _session_cookie(connection)
    return await services_of(connection).sessions.resolve(cookie) if cookie else None


async def _access_of_session(connection: Connection) -> Access:
    session = await session_of(connection)
    if session is None:
        raise InvalidApiKey("no administrator token was sent: use the header Authorization: Bearer gha_...")
    if connection.scope.get("method") not in SAFE_METHODS:
        _check_same_site(connection, session)
    if session.must_change_password:
        raise PasswordChangeNeeded("change the temporary password first, on the console's account page")
    member = session.member
    return await services_of(connection).memberships.access(member, _actor("member", member.email, member.id))


def _session_cookie(connection: Connection) -> str | None:
    """Return the session cookie, under the name that the console uses on this connection."""
    secure = is_secure(connection.scope["scheme"], services_of(connection).settings)
    return connection.cookies.get(session_cookie_name(secure=secure))


def _check_same_site(connection: Connection, session: Session) -> None:
    if not is_from_own_site(connection.headers) or not is_csrf_token_of(session, connection.headers.get(CSRF_HEADER, "")):
        raise RoleNotAllowed(f"a console session may write only from the console's pages, with the header {CSRF_HEADER}")


def _bearer(connection: Connection) -> str | None:
    scheme, _, secret = connection.headers.get("authorization", "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" and secret.strip() else None


def client_address(connection: Connection) -> str:
    """Return the address of the client, "" if it is not known."""
    return connection.client.host if connection.client is not None else ""
