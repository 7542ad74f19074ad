"""Requests: those in flight, live, above the history; one request in detail; cancelling."""

from __future__ import annotations

from typing import Any

from litestar import Response, get, post
from litestar.params import FromPath

from appliance.base.errors import NotFound
from appliance.console.context import Console, ConsoleDependency
from appliance.console.history import ENDS, Filters, history_page
from appliance.console.rendering import DONE, HTML, Html, is_fragment, toast_header
from appliance.console.request_bill import bill_of
from appliance.console.request_lines import RequestLine, live_line, past_line
from appliance.console.security import ConsoleRequest, access_of, needs
from appliance.console.tenant_names import tenants_by_name
from appliance.metering.ledger.records import UsageEvent
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action

LIVE_ROWS_MAX = 100


@get("/requests")
async def list_requests(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """In flight above, history below; when a filter changes, htmx requests only the history."""
    filters, access = Filters.of(request), access_of(request)
    tenants = await tenants_by_name(console.services, access)
    names = {tenant.id: tenant.name for tenant in tenants}
    history = await history_page(console.services, filters, names, access)
    live = live_rows(console, access)
    known = {"history": history, "filters": filters, "in_flight": live["live_total"] > 0, **console.example()}
    if is_fragment(request):
        return console.pages.page(request, "fragments/request_history.html", **known)
    return console.pages.page(
        request,
        "pages/requests.html",
        **live,
        **known,
        may_abort=access.may_somewhere(Action.ABORT),
        at=console.services.clock.now(),
        tenants=tenants,
        ends=ENDS,
    )


async def live_requests_fragment(console: Console, access: Access) -> str:
    """Return the live part of the page, with cancel buttons for those who may use them."""
    now = console.services.clock.now()
    return console.pages.fragment("fragments/live_requests.html", at=now, **live_rows(console, access))


def live_rows(console: Console, access: Access) -> dict[str, Any]:
    """Return the requests in flight that may be seen, oldest first; only the first ones of a long queue, because the table is
    sent once a second. `live_total` counts all of them; `cancellable` are the tenants whose requests may be ended here.
    """
    now = console.services.clock.now()
    seen = list(console.services.generations.live(access=access).values())
    rows = [live_line(live, now) for live in seen[:LIVE_ROWS_MAX]]
    cancellable = {row.tenant_id for row in rows if access.may(Action.ABORT, row.tenant_id)}
    return {"live": rows, "live_total": len(seen), "cancellable": cancellable}


@get("/requests/{request_id:str}")
async def show_request(request: ConsoleRequest, console: ConsoleDependency, request_id: FromPath[str]) -> Html:
    """Where the time of one request went, and what it cost."""
    row, event = await _find(console, request_id, access_of(request))
    return console.pages.page(
        request, "pages/request.html", row=row, event=event, **await bill_of(console.services, event, access_of(request))
    )


@post("/requests/cancel", guards=[needs(Action.ABORT)], status_code=200)
async def cancel_request(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """End a request in flight; what it generated so far is billed."""
    form, access, services = await console.form(request), access_of(request), console.services
    request_id = form.raw("request_id")
    live = services.generations.find(request_id, access=access, action=Action.ABORT)
    if live is not None and live.state == "finished":  # its usage is being recorded; nothing is left to end
        raise NotFound(f"the request {request_id} has ended")
    if live is not None:
        await services.audit.record("request.abort", "request", request_id, tenant_id=live.tenant_id)
    services.generations.abort(request_id, access=access)
    if not is_fragment(request):
        return console.pages.redirect(request, "/requests", done="request-cancelled")
    return Response("", media_type=HTML, headers={"hx-trigger": toast_header(DONE["request-cancelled"], "done")})


async def _find(console: Console, request_id: str, access: Access) -> tuple[RequestLine, UsageEvent]:
    """Return the request, live or past, and its event in the ledger. Raises NotFound, also for one that may not be seen."""
    event = await console.services.reports.event(request_id, access=access)
    live = console.services.generations.find(request_id, access=access)
    if live is not None:
        return live_line(live, console.services.clock.now()), event
    row = await console.services.past_requests.get(request_id, access=access)
    tenant = await console.services.tenants.get(row.tenant_id, access=access)
    key = await console.services.keys.get(row.key_id, access=access)
    return past_line(row, {tenant.id: tenant.name}, key.prefix), event


HANDLERS = (list_requests, show_request, cancel_request)
