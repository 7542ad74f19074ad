"""`/admin/v1/requests`: live and past requests in one list, newest first; DELETE aborts a live one."""

from __future__ import annotations

from litestar import delete, get
from litestar.params import FromPath

from appliance.api.auth import authenticate_administrator
from appliance.api.connection_services import services_of
from appliance.api.queries import PAGING, AdminRequest, paging
from appliance.api.shapes import PageShape, RequestShape, live_request_shape, page_shape, past_request_shape
from appliance.base.errors import NotFound
from appliance.metering.past_requests import RequestFilter
from appliance.serving.services import Services
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action


@get("/requests", summary="List requests", opt={"query": (*PAGING, "tenant_id", "key_id", "model")})
async def list_requests(request: AdminRequest) -> PageShape[RequestShape]:
    """Return live and past requests, most recently admitted first, with current figures for live ones."""
    access = await authenticate_administrator(request, Action.READ)
    services = services_of(request)
    filters = RequestFilter(
        tenant_id=request.query_params.get("tenant_id"),
        key_id=request.query_params.get("key_id"),
        model=request.query_params.get("model"),
        finished_only=False,
    )
    page = await services.past_requests.page(*paging(request), filters, access=access)
    return page_shape(page, lambda row: _live_shape(services, row.id, access) or past_request_shape(row))


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
    """Abort a live request and return it in its final state. Its client receives an error; tokens used so far are billed."""
    access = await authenticate_administrator(request, Action.ABORT)
    services = services_of(request)
    generations = services.generations
    live = generations.find(request_id, access=access, action=Action.ABORT)
    if live is None:
        raise NotFound("no such live request", param="request_id")
    if live.state != "finished":  # else it has ended on its own, and its usage is being recorded
        await services.audit.record("request.abort", "request", request_id, tenant_id=live.tenant_id)
    return live_request_shape(await generations.abort_and_wait(request_id, access=access))


def _live_shape(services: Services, request_id: str, access: Access) -> RequestShape | None:
    live = services.generations.find(request_id, access=access)
    return None if live is None else live_request_shape(live)
