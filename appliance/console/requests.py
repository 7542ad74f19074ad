"""Requests: those in flight (live), the history, the page of one request, and cancelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from litestar import Response, get, post
from litestar.params import FromPath

from appliance.base.errors import NotFound
from appliance.console.context import Console, ContextDependency
from appliance.console.history import FINISH_REASONS, Filters, history_page
from appliance.console.rendering import DONE, HTML, Html, is_fragment_request, toast_header
from appliance.console.request_bill import bill_of
from appliance.console.request_lines import RequestLine, live_line, past_line
from appliance.console.security import needs
from appliance.console.tenant_names import tenants_by_name
from appliance.metering.ledger.records import UsageEvent
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action

if TYPE_CHECKING:
    from appliance.serving.services import Services

LIVE_ROWS_MAX = 100


@get("/requests")
async def list_requests(context: ContextDependency) -> Html:
    """Requests in flight above, history below; when a filter changes, htmx requests only the history."""
    filters, access = Filters.of(context.query), context.access
    tenants = await tenants_by_name(context.services, access)
    names = {tenant.id: tenant.name for tenant in tenants}
    history = await history_page(context.services, filters, names, access)
    live = live_rows(context.services, access)
    return context.page(
        "pages/requests.html",
        part="fragments/request_history.html",
        **live,
        history=history,
        filters=filters,
        in_flight=live["live_total"] > 0,
        may_abort=access.may_somewhere(Action.ABORT),
        tenants=tenants,
        finish_reasons=FINISH_REASONS,
        **context.console.example(),
    )


async def live_requests_fragment(console: Console, access: Access) -> str:
    """Render the live part of the page, with cancel buttons for the requests that the member may cancel."""
    return console.pages.fragment("fragments/live_requests.html", **live_rows(console.services, access))


def live_rows(services: Services, access: Access) -> dict[str, Any]:
    """Return the template values for the visible requests in flight, in the order of their arrival.

    `live` has at most LIVE_ROWS_MAX rows, because the table is sent once a second; `live_total` counts all requests as of `at`.
    `cancellable` are the tenants whose requests the member may cancel.
    """
    now = services.clock.now()
    seen = list(services.generations.live(access=access).values())
    rows = [live_line(live, now) for live in seen[:LIVE_ROWS_MAX]]
    cancellable = {row.tenant_id for row in rows if access.may(Action.ABORT, row.tenant_id)}
    return {"at": now, "live": rows, "live_total": len(seen), "cancellable": cancellable}


@get("/requests/{request_id:str}")
async def show_request(context: ContextDependency, request_id: FromPath[str]) -> Html:
    """The timeline and the bill of one request. A page that follows a request which leaves no record, because it was refused
    while it waited for room in its limits, becomes the list."""
    try:
        row, event = await _find(context.services, request_id, context.access)
    except NotFound:
        if is_fragment_request(context.request):
            return context.redirect("/requests")
        raise
    bill = {} if event is None else await bill_of(context.services, event, context.access)
    return context.page("pages/request.html", row=row, event=event, **bill)


@post("/requests/cancel", guards=[needs(Action.ABORT)], status_code=200)
async def cancel_request(context: ContextDependency) -> Html:
    """Cancel a request in flight; the tokens generated so far are billed."""
    form, access, services = await context.form(), context.access, context.services
    request_id = form.raw("request_id")
    live = services.generations.find(request_id, access=access, action=Action.ABORT)
    if live is not None and live.state == "finished":  # only its usage is still being recorded
        raise NotFound(f"the request {request_id} has already finished")
    if live is not None:
        await services.audit.record("request.abort", "request", request_id, tenant_id=live.tenant_id)
    services.generations.abort(request_id, access=access)
    if not is_fragment_request(context.request):
        return context.redirect("/requests", done="request-cancelled")
    return Response("", media_type=HTML, headers={"hx-trigger": toast_header(DONE["request-cancelled"], "done")})


async def _find(services: Services, request_id: str, access: Access) -> tuple[RequestLine, UsageEvent | None]:
    """Return a live or past request and its ledger event, which a live request may not have yet. Raises NotFound, also for an
    invisible request."""
    try:
        event = await services.reports.event(request_id, access=access)
    except NotFound:
        live = services.generations.find(request_id, access=access)
        if live is None:
            raise
        return live_line(live, services.clock.now()), None
    live = services.generations.find(request_id, access=access)
    if live is not None:
        return live_line(live, services.clock.now()), event
    row = await services.past_requests.get(request_id, access=access)
    tenant = await services.tenants.get(row.tenant_id, access=access)
    key = await services.keys.get(row.key_id, access=access)
    return past_line(row, {tenant.id: tenant.name}, key.prefix), event
