"""Server-sent events for live pages: a rendered fragment per sample, until the session ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog
from litestar import get
from litestar.params import FromQuery
from litestar.response import Stream

from appliance.base.errors import InvalidValue, Overloaded
from appliance.console.context import Console, ContextDependency
from appliance.console.overview import overview_fragment
from appliance.console.requests import live_requests_fragment
from appliance.console.security import resolve_access, session_token
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action

log = structlog.get_logger()

STREAMS_MAX = 64
STREAMS_OF_MEMBER_MAX = 12  # two browsers with six connections each, the most that a browser opens to a host
SESSION_CHECK_TICKS = 10
RETRY_AFTER_S = 10.0
VIEWS = {"overview": overview_fragment, "requests": live_requests_fragment}


@get("/console/events")
async def live_stream(context: ContextDependency, view: FromQuery[str] = "overview") -> Stream:
    """Stream the live part of a page, one event per sample."""
    if view not in VIEWS:
        raise InvalidValue(f"view must be one of {', '.join(VIEWS)}", param="view")
    if view == "overview":
        context.access.require(Action.READ_APPLIANCE)
    member_id = context.session.member.id
    _check_stream_count(context.console, member_id)
    frames = _frames(context.console, view, token=session_token(context.request, context.services) or "")
    return Stream(
        _counted_stream(context.console, member_id, frames), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
    )


def _check_stream_count(console: Console, member_id: str) -> None:
    """Raise Overloaded if the maximum number of live pages is open, of all members or of this one. The limit per member keeps
    one member, who may belong to a single tenant, from using up all streams."""
    if console.open_streams.total() >= STREAMS_MAX:
        raise Overloaded(f"at most {STREAMS_MAX} live pages can be open", retry_after_s=RETRY_AFTER_S)
    if console.open_streams[member_id] >= STREAMS_OF_MEMBER_MAX:
        raise Overloaded(f"you can have at most {STREAMS_OF_MEMBER_MAX} live pages open", retry_after_s=RETRY_AFTER_S)


async def _counted_stream(console: Console, member_id: str, frames: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield `frames` and count the stream as open until they end."""
    async with aclosing(frames):
        try:
            _check_stream_count(console, member_id)  # again: several may have passed the first check before one began
        except Overloaded as error:
            log.warning("live page refused; the browser retries", reason=error.message)
            return
        console.open_streams[member_id] += 1
        try:
            async for frame in frames:
                yield frame
        finally:
            console.open_streams[member_id] -= 1
            console.open_streams += Counter()  # drops counts of zero


async def _frames(console: Console, view: str, *, token: str) -> AsyncGenerator[bytes, None]:
    """Yield frames until the appliance drains, the session ends, or its member may no longer see the page."""
    access: Access | None = None
    async with aclosing(console.services.sampler.subscribe()) as ticks:
        count = 0
        async for snapshot in ticks:
            if console.services.generations.draining:
                return
            if count % SESSION_CHECK_TICKS == 0:
                session = await console.services.sessions.resolve(token)
                access = None if session is None else await resolve_access(console.services, session)
            if access is None or (view == "overview" and not access.may(Action.READ_APPLIANCE)):
                yield format_event("signed-out", "sign in again")
                return
            count += 1
            yield await _render_frame(console, view, access, at=snapshot.at.isoformat())


async def _render_frame(console: Console, view: str, access: Access, *, at: str) -> bytes:
    """Return the frame of this sample, rendered once for all viewers with the same access."""
    if console.frames_at != at:
        console.frames_at, console.frames = at, {}
    cache_key = (view, access.role, frozenset(access.tenants.items()))
    if cache_key not in console.frames:
        console.frames[cache_key] = format_event(None, await VIEWS[view](console, access))
    return console.frames[cache_key]


def format_event(name: str | None, text: str) -> bytes:
    """Format one server-sent event; blank lines of the text are dropped, lines end in LF."""
    head = f"event: {name}\n" if name else ""
    body = "".join(f"data: {line.strip()}\n" for line in text.splitlines() if line.strip())
    return f"{head}{body}\n".encode()
