"""Invoices, free allowances and the seller under `/admin/v1`. This module handles JSON and files; the rules are in metering."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

import msgspec
from litestar import Response, delete, get, post, put
from litestar.params import FromPath

from appliance.api.admin.invoice_shapes import (
    AllowanceShape,
    InvoiceHeadShape,
    InvoiceShape,
    MonthShape,
    SellerShape,
    invoice_head_shape,
    invoice_shape,
    month_shape,
)
from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import decode_body
from appliance.api.connection_services import services_of
from appliance.api.field_types import Amount, Currency, Month, Name, Names, items, one_of, within
from appliance.api.queries import PAGING, AdminRequest, choice, page_of_list, paging
from appliance.api.shapes import LedgerEventShape, PageShape, ledger_event_shape, page_shape
from appliance.base.errors import InvalidValue, NotFound
from appliance.base.money import BASIS_POINTS
from appliance.metering.calendar import first_day
from appliance.metering.invoicing import months
from appliance.metering.invoicing.csv_file import render_csv
from appliance.metering.invoicing.pdf import render_pdf
from appliance.metering.invoicing.portions import DRAFT_CONDITIONS
from appliance.metering.invoicing.rows import STATES, TOTAL_MICROS_MAX, Invoice
from appliance.metering.invoicing.seller import LINES_MAX, TERMS_DAYS_DEFAULT, TERMS_DAYS_MAX, Seller, read_seller, store_seller
from appliance.metering.invoicing.wording import file_stem
from appliance.tenancy.access import Access
from appliance.tenancy.fields import LIST_ITEMS_MAX, check_names
from appliance.tenancy.roles import Action

NO_SELLER = (
    "the seller has not been entered yet: use gatehouse invoices seller --file, PUT /admin/v1/seller or the console's settings"
)
_FORMATS: dict[str, tuple[str, Callable[[Invoice], bytes]]] = {
    "json": ("application/json", lambda invoice: msgspec.json.encode(invoice_shape(invoice))),
    "csv": ("text/csv", render_csv),
    "pdf": ("application/pdf", render_pdf),
}


SellerLines = Annotated[list[Name], items(0, LINES_MAX)]


class DraftBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The month for which to draft an invoice."""

    month: Month
    only: Annotated[str, one_of(DRAFT_CONDITIONS)] | None = None


class ClosingBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the invoice must be when it is closed."""

    expected_total_micros: Annotated[int, within(-TOTAL_MICROS_MAX, TOTAL_MICROS_MAX)] | None = None
    expected_currency: Currency | None = None


class MonthBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tenants to bill."""

    tenant_ids: Names | None = None


class AllowanceBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A free allowance to set. It replaces earlier ones from `first_month` on."""

    first_month: Month
    monthly_micros: Amount


class SellerBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The seller named on new invoices. It replaces all fields of the previous one."""

    name: Name
    address: SellerLines = []
    email: Name | None = None
    phone: Name | None = None
    website: Name | None = None
    tax_id: Name | None = None
    registration: Name | None = None
    bank: SellerLines = []
    payment_terms_days: Annotated[int, within(0, TERMS_DAYS_MAX)] = TERMS_DAYS_DEFAULT
    payment_note: Name | None = None
    tax_basis_points: Annotated[int, within(0, BASIS_POINTS)] = 0
    tax_label: Name | None = None
    tax_note: Name | None = None


@get("/invoices", summary="List the invoices of all tenants", opt={"query": (*PAGING, "month", "state")})
async def list_invoices(request: AdminRequest) -> PageShape[InvoiceHeadShape]:
    """Return invoices without their lines, newest month first."""
    access = await authenticate_administrator(request, Action.INVOICES)
    month = request.query_params.get("month")
    if month is not None:
        first_day(month)
    page = await services_of(request).invoices.list(
        *paging(request),
        month=month,
        state=choice(request, "state", STATES, None),
        access=access,
    )
    return page_shape(page, invoice_head_shape)


@get("/tenants/{tenant_id:str}/invoices", summary="List a tenant's invoices", opt={"query": PAGING})
async def list_tenant_invoices(request: AdminRequest, tenant_id: FromPath[str]) -> PageShape[InvoiceShape]:
    """Return invoices with their lines, newest month first. Drafts show what would be billed now, or a `problem`."""
    access = await authenticate_administrator(request, Action.INVOICES, tenant_id)
    services = services_of(request)
    await services.tenants.get(tenant_id, access=access)
    return page_shape(await services.invoices.list_for_tenant(tenant_id, *paging(request), access=access), invoice_shape)


@post("/tenants/{tenant_id:str}/invoices", summary="Draft an invoice", opt={"body": DraftBody, "errors": (409,)})
async def draft_invoice(request: AdminRequest, tenant_id: FromPath[str]) -> InvoiceShape:
    """Create the draft of a month that has begun, or return the existing one. Its lines are computed on every read."""
    access = await authenticate_administrator(request, Action.BILLING, tenant_id)
    body = decode_body(await request.body(), DraftBody)
    invoices = services_of(request).invoices
    return invoice_shape(await invoices.draft(tenant_id, body.month, only=body.only, access=access))


@get(
    "/invoices/{invoice_id:str}",
    summary="Retrieve an invoice as JSON, CSV or PDF",
    opt={"response": InvoiceShape, "errors": (409,)},
)
async def retrieve_invoice(request: AdminRequest, invoice_id: FromPath[str]) -> Response[bytes]:
    """Return an invoice. Add `.json`, `.csv` or `.pdf` to its id to choose the format; JSON is the default."""
    access = await authenticate_administrator(request, Action.INVOICES)
    base_id, _, extension = invoice_id.partition(".")
    invoices = services_of(request).invoices
    head = await invoices.head(base_id, access=access)
    if extension and extension not in _FORMATS:
        raise NotFound(f"invoices are not available as .{extension}, only as .json, .csv and .pdf", param="invoice_id")
    media_type, render = _FORMATS[extension or "json"]
    invoice = await invoices.get(base_id, access=access)
    body = await asyncio.to_thread(render, invoice)
    tenant = await services_of(request).tenants.get(head.tenant_id, access=access)
    name = file_stem(head.number, head.month, head.tenant_id, tenant.name)
    headers = {"content-disposition": f'inline; filename="{name}.{extension}"'} if extension else {}
    return Response(body, media_type=media_type, headers=headers)


@get("/invoices/{invoice_id:str}/events", summary="List the usage events behind an invoice", opt={"query": PAGING})
async def list_invoice_events(request: AdminRequest, invoice_id: FromPath[str]) -> PageShape[LedgerEventShape]:
    """Return the usage events that make up the lines of the invoice, in the order in which they were posted."""
    access = await authenticate_administrator(request, Action.INVOICES)
    invoices = services_of(request).invoices
    return page_shape(await invoices.events(invoice_id, *paging(request), access=access), ledger_event_shape)


@post(
    "/invoices/{invoice_id:str}/close",
    status_code=200,
    summary="Close an invoice permanently",
    opt={"body": ClosingBody, "optional_body": True, "errors": (409,)},
)
async def close_invoice(request: AdminRequest, invoice_id: FromPath[str]) -> InvoiceShape:
    """Assign a number and freeze the invoice permanently. Its month must be over, and a tenant's months are closed in order."""
    access = await authenticate_administrator(request, Action.BILLING)
    body = decode_body(await request.body() or b"{}", ClosingBody)
    expected = msgspec.structs.asdict(body)
    return invoice_shape(await services_of(request).invoices.close(invoice_id, **expected, access=access))


@post(
    "/invoices/months/{month:str}/draft",
    status_code=200,
    summary="Draft a month for all tenants",
    opt={"body": MonthBody, "optional_body": True, "errors": (400,)},
)
async def draft_month(request: AdminRequest, month: FromPath[str]) -> MonthShape:
    """Draft a month that has begun for the tenants that have something to bill, or return their existing drafts."""
    access = await authenticate_administrator(request, Action.BILLING)
    tenant_ids = await _tenants_to_bill(request, access)
    return await month_shape(months.draft_month(services_of(request).invoices, tenant_ids, month, access=access))


@post(
    "/invoices/months/{month:str}/close",
    status_code=200,
    summary="Close a month for all tenants permanently",
    opt={"body": MonthBody, "optional_body": True, "errors": (400, 409)},
)
async def close_month(request: AdminRequest, month: FromPath[str]) -> MonthShape:
    """Draft and close a month that is over for the tenants that have something to bill. Repeated, it closes what is left."""
    access = await authenticate_administrator(request, Action.BILLING)
    tenant_ids = await _tenants_to_bill(request, access)
    return await month_shape(months.close_month(services_of(request).invoices, tenant_ids, month, access=access))


@delete("/invoices/{invoice_id:str}", status_code=204, summary="Discard a draft", opt={"errors": (409,)})
async def discard_invoice(request: AdminRequest, invoice_id: FromPath[str]) -> None:
    """Discard a draft. No usage is lost, and the month can be drafted again. A closed invoice is refused with 409."""
    access = await authenticate_administrator(request, Action.BILLING)
    await services_of(request).invoices.discard(invoice_id, access=access)


@get("/tenants/{tenant_id:str}/allowances", summary="List a tenant's free allowances", opt={"query": PAGING})
async def list_allowances(request: AdminRequest, tenant_id: FromPath[str]) -> PageShape[AllowanceShape]:
    """Return a tenant's free allowances in the order of their first months."""
    access = await authenticate_administrator(request, Action.INVOICES, tenant_id)
    services = services_of(request)
    await services.tenants.get(tenant_id, access=access)
    rows = await services.free_allowances.list(tenant_id, access=access)
    return page_shape(page_of_list(request, rows, "allowances", lambda row: row.first_month), AllowanceShape.of)


@post("/tenants/{tenant_id:str}/allowances", summary="Set a free allowance", opt={"body": AllowanceBody, "errors": (409,)})
async def set_allowance(request: AdminRequest, tenant_id: FromPath[str]) -> AllowanceShape:
    """Set the amount that is free each month, starting with a month that is not closed. Setting a month again replaces it."""
    access = await authenticate_administrator(request, Action.BILLING, tenant_id)
    body = decode_body(await request.body(), AllowanceBody)
    services = services_of(request)
    await services.tenants.get(tenant_id, access=access)
    allowances = services.free_allowances
    return AllowanceShape.of(await allowances.set(tenant_id, body.first_month, body.monthly_micros, access=access))


@get("/seller", summary="Retrieve the seller", opt={"errors": (404,)})
async def retrieve_seller(request: AdminRequest) -> SellerShape:
    """Return the seller named on new invoices; 404 until one is set."""
    await authenticate_administrator(request, Action.READ_APPLIANCE)
    seller = await read_seller(services_of(request).appliance_records)
    if seller is None:
        raise NotFound(NO_SELLER, param="seller")
    return _seller_shape(seller)


@put("/seller", summary="Set the seller", opt={"body": SellerBody})
async def replace_seller(request: AdminRequest) -> SellerShape:
    """Replace the seller named on new invoices. Closed invoices keep the seller they were closed with."""
    await authenticate_administrator(request, Action.BILLING)
    body = decode_body(await request.body(), SellerBody)
    fields = msgspec.structs.asdict(body)
    seller = Seller(**fields | {"address": tuple(body.address), "bank": tuple(body.bank)})
    await store_seller(services_of(request).appliance_records, seller)
    return _seller_shape(seller)


async def _tenants_to_bill(request: AdminRequest, access: Access) -> list[str]:
    """Return the ids in the request's body, or those of all tenants. Raises InvalidValue if one call cannot bill so many."""
    given = decode_body(await request.body() or b"{}", MonthBody).tenant_ids
    if given is not None:
        return list(dict.fromkeys(check_names(given, "tenant_ids")))
    every = await services_of(request).tenants.list(LIST_ITEMS_MAX, include_archived=True, access=access)
    if every.has_more:
        message = f"there are more than {LIST_ITEMS_MAX} tenants, archived ones included; bill at most so many with each call"
        raise InvalidValue(message, param="tenant_ids")
    return [tenant.id for tenant in every.data]


def _seller_shape(seller: Seller) -> SellerShape:
    return SellerShape(**seller.to_record())
