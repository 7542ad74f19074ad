"""`/admin/v1/requests`: live and past requests in one list, newest first; DELETE aborts a live one."""

from __future__ import annotations

from datetime import UTC, datetime

from litestar import delete, get
from litestar.params import FromPath

from appliance.api.auth import authenticate_administrator
from appliance.api.connection_services import services_of
from appliance.api.queries import PAGING, AdminRequest, paging
from appliance.api.shapes import PageShape, RequestShape, live_request_shape, page_shape, past_request_shape
from appliance.base.errors import NotFound
from appliance.metering.past_requests import PastRequest, RequestFilter
from appliance.serving.live_requests import LiveRequest
from appliance.serving.services import Services
from appliance.tenancy.access import Access
from appliance.tenancy.pages import Page, decode_cursor, page_of, to_micros
from appliance.tenancy.roles import Action


@get("/requests", summary="List requests", opt={"query": (*PAGING, "tenant_id", "key_id", "model")})
async def list_requests(request: AdminRequest) -> PageShape[RequestShape]:
    """Return live and past requests, with current figures for live ones: those that are not admitted yet, newest first, then
    the others, most recently admitted first."""
    access = await authenticate_administrator(request, Action.READ)
    services = services_of(request)
    filters = RequestFilter(
        tenant_id=request.query_params.get("tenant_id"),
        key_id=request.query_params.get("key_id"),
        model=request.query_params.get("model"),
        finished_only=False,
    )
    limit, cursor = paging(request)
    unrecorded = _unrecorded(services, filters, cursor, access)  # before the ledger is read, so that no request is in neither
    found = await services.past_requests.page(limit, cursor, filters, access=access)
    recorded = {row.id for row in found.data}
    rows: list[LiveRequest | PastRequest] = [*(live for live in unrecorded if live.id not in recorded), *found.data]
    rows.sort(key=_position, reverse=True)
    is_cut = len(rows) > limit
    page = page_of(rows, limit, "requests", _position) if is_cut else Page(data=rows, next_cursor=found.next_cursor)
    return page_shape(page, lambda row: _shape(services, row, access))


@get("/requests/{request_id:str}", summary="Retrieve a request")
async def retrieve_request(request: AdminRequest, request_id: FromPath[str]) -> RequestShape:
    """Return one live or past request."""
    access = await authenticate_administrator(request, Action.READ)
    services = services_of(request)
    live = services.generations.find(request_id, access=access)
    if live is not None:
        return live_request_shape(live)
    return past_request_shape(await services.past_requests.get(request_id, access=access))


@delete("/requests/{request_id:str}", status_code=200, summary="Abort a request")
async def abort_request(request: AdminRequest, request_id: FromPath[str]) -> RequestShape:
    """Abort a live request, which may wait for room in its limits, and return it in its final state. Its client receives an
    error; tokens used so far are billed."""
    access = await authenticate_administrator(request, Action.ABORT)
    services = services_of(request)
    generations = services.generations
    live = generations.find(request_id, access=access, action=Action.ABORT)
    if live is None:
        raise NotFound("no such live request", param="request_id")
    if live.state != "finished":  # else it has ended on its own, and its usage is being recorded
        await services.audit.record("request.abort", "request", request_id, tenant_id=live.tenant_id)
    return live_request_shape(await generations.abort_and_wait(request_id, access=access))


def _unrecorded(services: Services, filters: RequestFilter, cursor: str | None, access: Access) -> list[LiveRequest]:
    """Return the matching live requests after `cursor` that have no usage event yet."""
    after = None if cursor is None else decode_cursor("requests", cursor, [int, str])
    return [
        live
        for live in services.generations.unrecorded(access=access)
        if filters.tenant_id in (None, live.tenant_id)
        and filters.key_id in (None, live.key_id)
        and filters.model in (None, live.model)
        and (after is None or _position(live) < after)
    ]


def _position(row: LiveRequest | PastRequest) -> list[int | str]:
    """Return the place of a request in the list. Those that are not admitted yet come before all others."""
    return [to_micros(row.admitted_at or datetime.max.replace(tzinfo=UTC)), row.id]


def _shape(services: Services, row: LiveRequest | PastRequest, access: Access) -> RequestShape:
    if isinstance(row, LiveRequest):
        return live_request_shape(row)
    live = services.generations.find(row.id, access=access)
    return past_request_shape(row) if live is None else live_request_shape(live)
