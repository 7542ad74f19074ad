"""`/admin/v1/webhooks`: webhooks, their deliveries, tests and retries. The rules are in metering."""

from __future__ import annotations

from typing import Annotated

import msgspec
from litestar import delete, get, patch, post
from litestar.params import FromPath

from appliance.api.admin.webhook_shapes import DeliveryShape, NewWebhookShape, WebhookShape, webhook_shape
from appliance.api.auth import authenticate_administrator
from appliance.api.bodies import OMITTED, Omittable, decode_body, given_fields
from appliance.api.connection_services import services_of
from appliance.api.field_types import chars, items, one_of, within
from appliance.api.queries import PAGING, AdminRequest, choice, paging
from appliance.api.shapes import PageShape, page_shape
from appliance.metering.alerts.outbox import EVENTS, STATES, read_action
from appliance.metering.alerts.targets import TARGET_CHARS_MAX
from appliance.metering.alerts.webhooks import GRACE_S_DEFAULT, GRACE_S_MAX, KINDS, Webhook, WebhookChanges
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action

Target = Annotated[str, chars(1, TARGET_CHARS_MAX)]
Events = Annotated[list[Annotated[str, one_of(EVENTS)]], items(1, len(EVENTS))]


class NewWebhookBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A webhook to create."""

    kind: Annotated[str, one_of(KINDS)]
    target: Target
    tenant_id: str | None = None
    events: Events | None = None


class WebhookPatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a webhook to change. Fields left out keep their values."""

    target: Target | Omittable = OMITTED
    events: Events | Omittable = OMITTED
    disabled: bool | Omittable = OMITTED


class WebhookRotationBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How to rotate a signing secret. The body may be left out."""

    grace_s: Annotated[int, within(0, GRACE_S_MAX)] = GRACE_S_DEFAULT


@get("/webhooks", summary="List webhooks", opt={"query": (*PAGING, "tenant_id"), "errors": (404,)})
async def list_webhooks(request: AdminRequest) -> PageShape[WebhookShape]:
    """Return webhooks in the order they were created, without their secrets."""
    access = await _reader(request)
    tenant_id = request.query_params.get("tenant_id")
    if tenant_id is not None:
        access.require(read_action(access), tenant_id)
    page = await services_of(request).alerts.webhooks.list(*paging(request), tenant_id=tenant_id, access=access)
    return page_shape(page, lambda webhook: _shape(access, webhook))


@post("/webhooks", summary="Create a webhook", opt={"body": NewWebhookBody, "errors": (404, 409)})
async def create_webhook(request: AdminRequest) -> NewWebhookShape:
    """Create a webhook. `secret`, which signs its messages, is returned only in this response."""
    access = await authenticate_administrator(request, Action.WEBHOOKS)
    body = decode_body(await request.body(), NewWebhookBody)
    webhook, secret = await services_of(request).alerts.webhooks.create(
        kind=body.kind, target=body.target, tenant_id=body.tenant_id, events=body.events, access=access
    )
    return NewWebhookShape.of(webhook, secret=secret)


@get("/webhooks/{webhook_id:str}", summary="Retrieve a webhook")
async def retrieve_webhook(request: AdminRequest, webhook_id: FromPath[str]) -> WebhookShape:
    """Return one webhook without its secret."""
    access = await _reader(request)
    return _shape(access, await services_of(request).alerts.webhooks.get(webhook_id, access=access))


@patch("/webhooks/{webhook_id:str}", summary="Change a webhook", opt={"body": WebhookPatch})
async def change_webhook(request: AdminRequest, webhook_id: FromPath[str]) -> WebhookShape:
    """Change the given fields. A disabled webhook receives nothing; its pending messages are kept."""
    access = await authenticate_administrator(request, Action.WEBHOOKS)
    body = decode_body(await request.body(), WebhookPatch)
    changes = WebhookChanges(**given_fields(body))
    return webhook_shape(await services_of(request).alerts.webhooks.update(webhook_id, changes, access=access))


@delete("/webhooks/{webhook_id:str}", status_code=200, summary="Remove a webhook")
async def remove_webhook(request: AdminRequest, webhook_id: FromPath[str]) -> WebhookShape:
    """Remove a webhook and its pending messages."""
    access = await authenticate_administrator(request, Action.WEBHOOKS)
    return webhook_shape(await services_of(request).alerts.webhooks.remove(webhook_id, access=access))


@post(
    "/webhooks/{webhook_id:str}/rotate",
    status_code=200,
    summary="Rotate a webhook's secret",
    opt={"body": WebhookRotationBody, "optional_body": True},
)
async def rotate_webhook(request: AdminRequest, webhook_id: FromPath[str]) -> NewWebhookShape:
    """Create a new signing secret, returned only in this response. During the grace period messages are signed with both."""
    access = await authenticate_administrator(request, Action.WEBHOOKS)
    body = decode_body(await request.body() or b"{}", WebhookRotationBody)
    webhook, secret = await services_of(request).alerts.webhooks.rotate(webhook_id, body.grace_s, access=access)
    return NewWebhookShape.of(webhook, secret=secret)


@post("/webhooks/{webhook_id:str}/test", summary="Send a test message to a webhook", opt={"errors": (400, 409, 429)})
async def send_test(request: AdminRequest, webhook_id: FromPath[str]) -> DeliveryShape:
    """Queue a message with the event `webhook.test`. Retrieve the returned delivery to see the outcome."""
    access = await authenticate_administrator(request, Action.WEBHOOKS)
    return DeliveryShape.of(await services_of(request).alerts.outbox.send_test(webhook_id, access=access))


@get("/webhooks/{webhook_id:str}/deliveries", summary="List a webhook's deliveries", opt={"query": (*PAGING, "state")})
async def list_deliveries(request: AdminRequest, webhook_id: FromPath[str]) -> PageShape[DeliveryShape]:
    """Return the messages sent or to be sent to a webhook, newest first."""
    access = await _reader(request)
    state = choice(request, "state", STATES, None)
    page = await services_of(request).alerts.outbox.list(webhook_id, *paging(request), state=state, access=access)
    return page_shape(page, DeliveryShape.of)


@get("/webhooks/{webhook_id:str}/deliveries/{delivery_id:str}", summary="Retrieve a delivery")
async def retrieve_delivery(request: AdminRequest, webhook_id: FromPath[str], delivery_id: FromPath[str]) -> DeliveryShape:
    """Return one message and the state of its delivery."""
    access = await _reader(request)
    return DeliveryShape.of(await services_of(request).alerts.outbox.get(webhook_id, delivery_id, access=access))


@post(
    "/webhooks/{webhook_id:str}/deliveries/{delivery_id:str}/retry",
    status_code=200,
    summary="Retry a delivery",
    opt={"errors": (400, 409, 429)},
)
async def retry_delivery(request: AdminRequest, webhook_id: FromPath[str], delivery_id: FromPath[str]) -> DeliveryShape:
    """Send a message again with the same id, whatever its state."""
    access = await authenticate_administrator(request, Action.WEBHOOKS)
    return DeliveryShape.of(await services_of(request).alerts.outbox.retry(webhook_id, delivery_id, access=access))


async def _reader(request: AdminRequest) -> Access:
    """Return the caller's access. Raises RoleNotAllowed unless it permits reading webhooks of a tenant or the appliance."""
    access = await authenticate_administrator(request, Action.READ)
    access.require_somewhere(read_action(access))
    return access


def _shape(access: Access, webhook: Webhook) -> WebhookShape:
    return webhook_shape(webhook, full_target=access.may(Action.WEBHOOKS, webhook.tenant_id))
