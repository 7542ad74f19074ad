"""`/admin/v1/sessions`: who is signed in where; also the second factors and sign-in providers of other members.

Members see and end their own sessions; those of others need `Action.MEMBERS`.
"""

from __future__ import annotations

import msgspec
from litestar import delete, get
from litestar.params import FromPath

from appliance.api.auth import authenticate_administrator, authenticate_anybody, session_of
from appliance.api.connection_services import services_of
from appliance.api.queries import PAGING, AdminRequest, paging
from appliance.api.shapes import PageShape, page_shape, shape_of
from appliance.base.errors import InvalidValue, NotFound
from appliance.tenancy.access import Access
from appliance.tenancy.devices import device_of
from appliance.tenancy.roles import Action
from appliance.tenancy.sessions import Session

TAGS = ["administration"]


class SessionShape(msgspec.Struct, kw_only=True):
    """A signed-in browser. `method` says how: password or oidc, and what came after; `current` marks the one that asks."""

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
    """How many sessions were ended."""

    ended: int


class SecondFactorShape(msgspec.Struct, kw_only=True):
    """Whether a member needs a code to sign in, since when, and how many recovery codes are left."""

    member_id: str
    enabled: bool
    enabled_at: str | None
    recovery_codes_left: int


class ProviderLinkShape(msgspec.Struct, kw_only=True):
    """The sign-in provider that a member is linked with; null is none."""

    member_id: str
    issuer: str | None


@get("/sessions", summary="List who is signed in", tags=TAGS, opt={"query": (*PAGING, "member_id")})
async def list_sessions(request: AdminRequest) -> PageShape[SessionShape]:
    """Return live sessions, the newest first: a member's own, or those of `member_id`; a token without it gets all."""
    access = await authenticate_anybody(request)
    asking = await session_of(request)
    member_id = _requested_member_id(request, access)
    page = await services_of(request).sessions.list(member_id, *paging(request))
    return page_shape(page, lambda session: _shape(session, asking))


@delete("/sessions/{session_id:str}", status_code=200, summary="End a session", tags=TAGS)
async def end_session(request: AdminRequest, session_id: FromPath[str]) -> EndedShape:
    """Sign a browser out, at once."""
    access = await authenticate_anybody(request)
    own_alone = None if access.may(Action.MEMBERS) else _member_id(access)
    if own_alone is None:
        access.require(Action.MEMBERS)
    await services_of(request).sessions.end(session_id, member_id=own_alone)
    return EndedShape(ended=1)


@delete("/sessions", status_code=200, summary="End every other session", tags=TAGS, opt={"query": ("member_id",)})
async def end_sessions(request: AdminRequest) -> EndedShape:
    """End every session of a member but the one that asks: of who asks, or of `member_id`."""
    access = await authenticate_anybody(request)
    member_id = _requested_member_id(request, access)
    if member_id is None:
        raise InvalidValue("member_id is required: the member whose sessions to end", param="member_id")
    asking = await session_of(request)
    ended = await services_of(request).sessions.close_all(member_id, keep=asking.id if asking else None)
    return EndedShape(ended=ended)


@get("/members/{member_id:str}/second-factor", summary="Whether a member has a second factor", tags=TAGS)
async def retrieve_second_factor(request: AdminRequest, member_id: FromPath[str]) -> SecondFactorShape:
    """Return whether the member needs a code to sign in."""
    await authenticate_administrator(request, Action.READ_BOX)
    return await _second_factor(request, member_id)


@delete("/members/{member_id:str}/second-factor", status_code=200, summary="Reset a member's second factor", tags=TAGS)
async def reset_second_factor(request: AdminRequest, member_id: FromPath[str]) -> SecondFactorShape:
    """Take a lost second factor away and end the member's sessions; the password alone signs in until a new one is set up."""
    await authenticate_administrator(request, Action.MEMBERS)
    await services_of(request).second_factors.reset(member_id)
    return await _second_factor(request, member_id)


@delete("/members/{member_id:str}/provider", status_code=200, summary="Unlink a member from the provider", tags=TAGS)
async def unlink_provider(request: AdminRequest, member_id: FromPath[str]) -> ProviderLinkShape:
    """Forget who the member is at the sign-in provider: the next sign-in there links again, by verified e-mail."""
    await authenticate_administrator(request, Action.MEMBERS)
    identities = services_of(request).identities
    await identities.unlink(member_id)
    return ProviderLinkShape(member_id=member_id, issuer=await identities.issuer_of(member_id))


def _requested_member_id(request: AdminRequest, access: Access) -> str | None:
    """Return the member id whose sessions are meant; None means all members.

    Raises RoleNotAllowed, or NotFound for a caller who may see no sessions but their own.
    """
    own, asked = _member_id(access), request.query_params.get("member_id")
    if asked is None and own is not None:
        return own
    if asked is not None and asked == own:
        return own
    if not access.sees_all:
        raise NotFound("no such member", param="member_id")
    access.require(Action.MEMBERS)
    return asked


def _member_id(access: Access) -> str | None:
    """Return the id of the calling member; None for tokens and commands, which are not members."""
    return access.actor.id if access.actor.kind == "member" else None


async def _second_factor(request: AdminRequest, member_id: str) -> SecondFactorShape:
    state = await services_of(request).second_factors.state(member_id)
    return shape_of(SecondFactorShape, state, member_id=member_id, enabled=state.enabled_at is not None)


def _shape(session: Session, asking: Session | None) -> SessionShape:
    return shape_of(
        SessionShape,
        session,
        member_id=session.member.id,
        email=session.member.email,
        device=device_of(session.user_agent),
        current=asking is not None and asking.id == session.id,
    )


HANDLERS = [
    list_sessions,
    end_session,
    end_sessions,
    retrieve_second_factor,
    reset_second_factor,
    unlink_provider,
]
