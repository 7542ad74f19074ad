"""`/admin/v1/system` and `/admin/v1/events`: the current state of the appliance, and a stream of it, one event a second."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec
from litestar import get
from litestar.response import Stream

from appliance.api.admin.system_shapes import SystemShape, system_shape
from appliance.api.auth import authenticate_administrator
from appliance.api.connection_services import services_of
from appliance.api.exchange import exchange_of
from appliance.api.queries import AdminRequest
from appliance.api.sse import EVENT_STREAM, EventStream
from appliance.base.errors import Forbidden, Overloaded, Unauthenticated
from appliance.serving.services import Services
from appliance.telemetry.readings import SystemSnapshot
from appliance.telemetry.sampler import TooManySubscribers
from appliance.tenancy.roles import Action

RETRY_AFTER_S = 15.0
CREDENTIAL_CHECKED_EVERY_TICKS = 10
STREAMS_MAX = 192  # open at once, counting the console's live pages, which have a limit of their own


@get("/system", summary="Retrieve the state of the appliance")
async def retrieve_system(request: AdminRequest) -> SystemShape:
    """Return the latest readings of processes, engines, GPUs, host and database, which are taken once a second."""
    await authenticate_administrator(request, Action.READ_APPLIANCE)
    services = services_of(request)
    return system_shape(services.sampler.latest, services.version)


@get("/events", summary="Stream the state of the appliance", opt={"text": EVENT_STREAM, "errors": (503,)})
async def stream_events(request: AdminRequest) -> Stream:
    """Send the response of `/admin/v1/system` as an event named `system` for each new reading. Slow clients miss readings."""
    await authenticate_administrator(request, Action.READ_APPLIANCE)
    services = services_of(request)
    snapshots = services.sampler.subscribe(at_most=STREAMS_MAX)
    try:
        first = await anext(snapshots)
    except TooManySubscribers as error:
        raise Overloaded(str(error), retry_after_s=RETRY_AFTER_S) from error
    exchange_of(request).cancel_on_disconnect(request.receive)
    return EventStream(_frames(request, first, snapshots))


async def _frames(
    request: AdminRequest, first: SystemSnapshot, snapshots: AsyncGenerator[SystemSnapshot, None]
) -> AsyncIterator[bytes]:
    """Yield frames until the appliance drains or the caller loses access.

    There is a frame every second, so the connection needs no pings.
    """
    services = services_of(request)
    count = 0
    yield _frame(services, first)
    async with aclosing(snapshots):
        async for snapshot in snapshots:
            yield _frame(services, snapshot)
            count += 1
            if services.generations.draining or (count % CREDENTIAL_CHECKED_EVERY_TICKS == 0 and await _is_revoked(request)):
                return


async def _is_revoked(request: AdminRequest) -> bool:
    try:
        await authenticate_administrator(request, Action.READ_APPLIANCE)
    except (Unauthenticated, Forbidden):
        return True
    return False


def _frame(services: Services, snapshot: SystemSnapshot) -> bytes:
    body = msgspec.json.encode(system_shape(snapshot, services.version))
    return b"event: system\ndata: " + body + b"\n\n"
