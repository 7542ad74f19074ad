"""The JSON of webhooks and of what is delivered to them."""

from __future__ import annotations

from typing import Any

import msgspec

from appliance.base.clock import rfc3339
from appliance.metering.alerts.outbox import Delivery
from appliance.metering.alerts.targets import shown_target
from appliance.metering.alerts.webhooks import Webhook


class WebhookShape(msgspec.Struct, kw_only=True):
    """Where alerts go. Without a tenant it hears of all of them; until `previous_secret_until` two secrets sign.

    Who may not manage it sees of a URL in `target` no path: it is often a secret.
    """

    id: str
    tenant_id: str | None
    kind: str
    target: str
    events: list[str]
    disabled: bool
    previous_secret_until: str | None
    created_at: str


class NewWebhookShape(WebhookShape, kw_only=True):
    """A webhook with its signing secret in `secret`: shown in this answer and never again. E-mail has none."""

    secret: str | None


class DeliveryShape(msgspec.Struct, kw_only=True):
    """A message to a webhook: `state` is pending, delivered or failed (given up). `id` is its `webhook-id`."""

    id: str
    webhook_id: str
    event: str
    state: str
    attempts: int
    next_attempt_at: str | None
    delivered_at: str | None
    last_error: str | None
    payload: dict[str, Any]
    created_at: str


def webhook_shape(webhook: Webhook, *, whole: bool = True) -> WebhookShape:
    """Return the JSON of `webhook`, with the whole target or as much as everybody may read."""
    shape = WebhookShape(**_webhook(webhook))
    return shape if whole else msgspec.structs.replace(shape, target=shown_target(webhook.kind, webhook.target))


def new_webhook_shape(webhook: Webhook, secret: str | None) -> NewWebhookShape:
    """Return the JSON of `webhook` with its secret."""
    return NewWebhookShape(**_webhook(webhook), secret=secret)


def delivery_shape(delivery: Delivery) -> DeliveryShape:
    """Return the JSON of `delivery`."""
    return DeliveryShape(
        id=delivery.id,
        webhook_id=delivery.webhook_id,
        event=delivery.event,
        state=delivery.state,
        attempts=delivery.attempts,
        next_attempt_at=None if delivery.next_attempt_at is None else rfc3339(delivery.next_attempt_at),
        delivered_at=None if delivery.delivered_at is None else rfc3339(delivery.delivered_at),
        last_error=delivery.last_error,
        payload=delivery.payload,
        created_at=rfc3339(delivery.created_at),
    )


def _webhook(webhook: Webhook) -> dict[str, Any]:
    until = webhook.previous_secret_until
    return {
        "id": webhook.id,
        "tenant_id": webhook.tenant_id,
        "kind": webhook.kind,
        "target": webhook.target,
        "events": list(webhook.events),
        "disabled": webhook.disabled,
        "previous_secret_until": None if until is None else rfc3339(until),
        "created_at": rfc3339(webhook.created_at),
    }
