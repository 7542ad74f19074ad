"""The JSON of webhooks and their deliveries."""

from __future__ import annotations

from typing import Any

from appliance.api.shapes import Shape
from appliance.metering.alerts.targets import redact_target
from appliance.metering.alerts.webhooks import Webhook


class WebhookShape(Shape, kw_only=True):
    """A destination of alerts: a URL or an e-mail address."""

    id: str
    tenant_id: str | None
    kind: str
    target: str
    events: list[str]
    disabled: bool
    previous_secret_until: str | None
    created_at: str


class NewWebhookShape(WebhookShape, kw_only=True):
    """A webhook with its signing secret, which is returned only in this response."""

    secret: str | None


class DeliveryShape(Shape, kw_only=True):
    """A message to a webhook and the state of its delivery."""

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


def webhook_shape(webhook: Webhook, *, full_target: bool = True) -> WebhookShape:
    """Return the JSON of `webhook`, with its full target or only the part that is not secret."""
    target = webhook.target if full_target else redact_target(webhook.kind, webhook.target)
    return WebhookShape.of(webhook, target=target)
