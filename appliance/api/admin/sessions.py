"""`/admin/v1/sessions`: console sessions; also the second factors and sign-in provider links of other members.

Members may see and end their own sessions. Those of others require `Action.MEMBERS`.
"""

from __future__ import annotations

import msgspec
from litestar import delete, get
from litestar.params import FromPath

from appliance.api.auth import authenticate_administrator, authenticate_anybody, session_of
from appliance.api.connection_services import services_of
from appliance.api.queries import PAGING, AdminRequest, paging
from appliance.api.shapes import PageShape, Shape, page_shape
from appliance.base.errors import InvalidValue, NotFound
from appliance.tenancy.access import Access
from appliance.tenancy.devices import device_of
from appliance.tenancy.roles import Action
from appliance.tenancy.sessions import Session


class SessionShape(Shape, kw_only=True):
    """A browser that is signed in to the console."""

    id: str
    member_id: str
    email: str
    method: str
    device: str
    user_agent: str
    address: str
    current: bool
    created_at: str
    last_seen_at: str
    expires_at: str


class EndedShape(msgspec.Struct, kw_only=True):
    """The number of sessions that were ended."""

    ended: int


class SecondFactorShape(Shape, kw_only=True):
    """The state of a member's second factor."""

    member_id: str
    enabled: bool
    enabled_at: str | None
    recovery_codes_left: int


class ProviderLinkShape(msgspec.Struct, kw_only=True):
    """A member's link to the sign-in provider."""

    member_id: str
    issuer: str | None


@get("/sessions", summary="List sessions", opt={"query": (*PAGING, "member_id"), "errors": (404,)})
async def list_sessions(request: AdminRequest) -> PageShape[SessionShape]:
    """Return active sessions, newest first: by default the caller's own, or for a token those of all members."""
    access = await authenticate_anybody(request)
    current = await session_of(request)
    member_id = _requested_member_id(request, access)
    page = await services_of(request).sessions.list(member_id, *paging(request))
    return page_shape(page, lambda session: _shape(session, current))


@delete("/sessions/{session_id:str}", status_code=200, summary="End a session")
async def end_session(request: AdminRequest, session_id: FromPath[str]) -> EndedShape:
    """Sign one browser out at once."""
    access = await authenticate_anybody(request)
    owner_id = None if access.may(Action.MEMBERS) else _own_member_id(access)
    if owner_id is None:
        access.require(Action.MEMBERS)
    await services_of(request).sessions.end(session_id, member_id=owner_id)
    return EndedShape(ended=1)


@delete("/sessions", status_code=200, summary="End all other sessions", opt={"query": ("member_id",), "errors": (404,)})
async def end_sessions(request: AdminRequest) -> EndedShape:
    """End every session of the caller, or of `member_id`, except the session that makes this call."""
    access = await authenticate_anybody(request)
    member_id = _requested_member_id(request, access)
    if member_id is None:
        raise InvalidValue("member_id is required: the member whose sessions to end", param="member_id")
    current = await session_of(request)
    ended = await services_of(request).sessions.close_all(member_id, keep=current.id if current else None)
    return EndedShape(ended=ended)


@get("/members/{member_id:str}/second-factor", summary="Retrieve a member's second factor")
async def retrieve_second_factor(request: AdminRequest, member_id: FromPath[str]) -> SecondFactorShape:
    """Return whether the member needs a code to sign in, and how many recovery codes are left."""
    await authenticate_administrator(request, Action.READ_APPLIANCE)
    return await _second_factor(request, member_id)


@delete("/members/{member_id:str}/second-factor", status_code=200, summary="Reset a member's second factor")
async def reset_second_factor(request: AdminRequest, member_id: FromPath[str]) -> SecondFactorShape:
    """Remove a lost second factor and end the member's sessions. Until a new one is set up, the password is sufficient."""
    await authenticate_administrator(request, Action.MEMBERS)
    await services_of(request).second_factors.reset(member_id)
    return await _second_factor(request, member_id)


@delete("/members/{member_id:str}/provider", status_code=200, summary="Unlink a member from the sign-in provider")
async def unlink_provider(request: AdminRequest, member_id: FromPath[str]) -> ProviderLinkShape:
    """Remove a member's link to the sign-in provider. The next sign-in there links it again, by verified e-mail address."""
    await authenticate_administrator(request, Action.MEMBERS)
    identities = services_of(request).identities
    await identities.unlink(member_id)
    return ProviderLinkShape(member_id=member_id, issuer=await identities.issuer_of(member_id))


def _requested_member_id(request: AdminRequest, access: Access) -> str | None:
    """Return the member whose sessions are requested, None for all members.

    Raises RoleNotAllowed, or NotFound for a caller who may see only their own sessions.
    """
    own, requested = _own_member_id(access), request.query_params.get("member_id")
    if requested is None and own is not None:
        return own
    if requested is not None and requested == own:
        return own
    if not access.sees_all:
        raise NotFound("no such member", param="member_id")
    access.require(Action.MEMBERS)
    return requested


def _own_member_id(access: Access) -> str | None:
    """Return the id of the calling member; None for tokens and commands, which are not members."""
    return access.actor.id if access.actor.kind == "member" else None


async def _second_factor(request: AdminRequest, member_id: str) -> SecondFactorShape:
    state = await services_of(request).second_factors.state(member_id)
    return SecondFactorShape.of(state, member_id=member_id, enabled=state.enabled_at is not None)


def _shape(session: Session, current: Session | None) -> SessionShape:
    return SessionShape.of(
        session,
        member_id=session.member.id,
        email=session.member.email,
        device=device_of(session.user_agent),
        current=current is not None and current.id == session.id,
    )
