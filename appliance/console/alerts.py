"""Alert targets: webhooks and mailboxes, and the state of their deliveries. A signing secret is shown only once.

Every role on the appliance can read the list. In a tenant only those who manage its webhooks can, because webhook URLs often
contain secrets.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any

from litestar import get, post
from litestar.params import FromPath

from appliance.base.errors import Conflict, RateLimitExceeded
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import GRACE_CHOICES, Form, sentence
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.console.tenant_names import tenant_names, tenants_by_name
from appliance.console.urls import next_page_url
from appliance.metering.alerts.outbox import EVENTS, LEASE_S, TENANT_EVENTS, Delivery, read_action
from appliance.metering.alerts.targets import TARGET_CHARS_MAX, redact_target
from appliance.metering.alerts.webhooks import KINDS, Webhook, WebhookChanges
from appliance.serving.alerting.texts import text_of
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action

PAGE_ROWS = 100
DELIVERIES_SHOWN = 50
POLLED_BEFORE = timedelta(seconds=LEASE_S)  # includes an attempt that is in progress
FIELDS = ("kind", "target", "tenant_id", "events", "grace_s")
KIND_LABELS = (("webhook", "Webhook (signed HTTP request)"), ("email", "E-mail"))
EVENT_LABELS = {
    "budget.threshold": "Budget threshold reached",
    "tokens_per_day.threshold": "Daily token threshold reached",
    "invoice.closed": "Invoice closed",
    "key.expiring": "Key expiring soon",
    "engine.down": "Engine down",
    "engine.gpu_unused": "GPU not used",
    "engine.kernels_refused": "Kernels refused",
    "webhook.test": "Test",
}


@get("/alerts")
async def list_alerts(context: ContextDependency) -> Html:
    """The alert targets that the member may see."""
    access = context.access
    access.require_somewhere(read_action(access))
    page = await context.services.alerts.webhooks.list(PAGE_ROWS, context.query.get("cursor"), access=access)
    names = await tenant_names(context.services, access)
    failing = await context.services.alerts.webhooks.failing([webhook.id for webhook in page.data])
    return context.page(
        "pages/alerts.html",
        webhooks=[_row(access, webhook, names, failing) for webhook in page.data],
        may_webhooks=access.may_somewhere(Action.WEBHOOKS),
        next_page=next_page_url("/alerts", page),
    )


@get("/alerts/new", guards=[needs(Action.WEBHOOKS)])
async def new_alert(context: ContextDependency) -> Html:
    """The form for a new alert target."""
    return await _new_form(context, None)


@post("/alerts", guards=[needs(Action.WEBHOOKS)], status_code=200)
async def add_alert(context: ContextDependency) -> Html:
    """Add an alert target and show its secret, or show the form again with the errors."""
    form = await context.form()
    kind, target = form.choice("kind", KINDS), form.text("target", chars_max=TARGET_CHARS_MAX)
    tenant_id = form.raw("tenant_id") or None
    events = _read_events(form, tenant_id)
    if tenant_id is not None or not form.errors:
        context.access.require(Action.WEBHOOKS, tenant_id)
    if not form.errors:
        with form.refusals(FIELDS):
            webhook, secret = await context.services.alerts.webhooks.create(
                kind=kind, target=target, tenant_id=tenant_id, events=events, access=context.access
            )
            if secret is None:
                return context.redirect(f"/alerts/{webhook.id}", done="alert-added")
            return _secret(context, webhook, secret, "Signing secret")
    return await _new_form(context, form)


@get("/alerts/{webhook_id:str}")
async def show_alert(context: ContextDependency, webhook_id: FromPath[str]) -> Html:
    """One alert target: its settings and latest deliveries."""
    return await _alert_page(context, await _get_webhook(context, webhook_id, read_action(context.access)))


@post("/alerts/{webhook_id:str}", guards=[needs(Action.WEBHOOKS)], status_code=200)
async def save_alert(context: ContextDependency, webhook_id: FromPath[str]) -> Html:
    """Save address and events, or show the page again with the errors."""
    webhook, form = await _get_webhook(context, webhook_id), await context.form()
    target, events = form.text("target", chars_max=TARGET_CHARS_MAX), _read_events(form, webhook.tenant_id)
    if not form.errors:
        with form.refusals(FIELDS):
            changes = WebhookChanges(target=target, events=events)
            await context.services.alerts.webhooks.update(webhook.id, changes, access=context.access)
            return context.redirect(f"/alerts/{webhook.id}", done="alert-saved")
    return await _alert_page(context, webhook, form)


@post("/alerts/{webhook_id:str}/pause", guards=[needs(Action.WEBHOOKS)], status_code=200)
async def pause_alert(context: ContextDependency, webhook_id: FromPath[str]) -> Html:
    """Stop sending until it is resumed; pending messages are kept."""
    await context.services.alerts.webhooks.update(webhook_id, WebhookChanges(disabled=True), access=context.access)
    return context.redirect(f"/alerts/{webhook_id}", done="alert-paused")


@post("/alerts/{webhook_id:str}/resume", guards=[needs(Action.WEBHOOKS)], status_code=200)
async def resume_alert(context: ContextDependency, webhook_id: FromPath[str]) -> Html:
    """Send again, pending messages first."""
    await context.services.alerts.webhooks.update(webhook_id, WebhookChanges(disabled=False), access=context.access)
    return context.redirect(f"/alerts/{webhook_id}", done="alert-resumed")


@post("/alerts/{webhook_id:str}/test", guards=[needs(Action.WEBHOOKS)], status_code=200)
async def send_test(context: ContextDependency, webhook_id: FromPath[str]) -> Html:
    """Queue a test message; its result appears in the list of deliveries."""
    webhook = await _get_webhook(context, webhook_id)
    try:
        await context.services.alerts.outbox.send_test(webhook_id, access=context.access)
    except (Conflict, RateLimitExceeded) as error:
        return await _alert_page(context, webhook, notice=sentence(error.message))
    return context.redirect(f"/alerts/{webhook_id}", done="test-sent")


@post("/alerts/{webhook_id:str}/deliveries/{delivery_id:str}/retry", guards=[needs(Action.WEBHOOKS)], status_code=200)
async def retry_delivery(context: ContextDependency, webhook_id: FromPath[str], delivery_id: FromPath[str]) -> Html:
    """Queue a message again under the same id, whatever its state."""
    webhook = await _get_webhook(context, webhook_id)
    try:
        await context.services.alerts.outbox.retry(webhook_id, delivery_id, access=context.access)
    except (Conflict, RateLimitExceeded) as error:
        return await _alert_page(context, webhook, notice=sentence(error.message))
    return context.redirect(f"/alerts/{webhook_id}", done="delivery-retried")


@get("/alerts/{webhook_id:str}/rotate", guards=[needs(Action.WEBHOOKS)])
async def confirm_rotation(context: ContextDependency, webhook_id: FromPath[str]) -> Html:
    """Confirm a rotation and choose how long the old secret also signs."""
    return _confirm(context, await _get_webhook(context, webhook_id), "rotate", None)


@post("/alerts/{webhook_id:str}/rotate", guards=[needs(Action.WEBHOOKS)], status_code=200)
async def rotate_secret(context: ContextDependency, webhook_id: FromPath[str]) -> Html:
    """Replace the secret and show the new one."""
    webhook, form = await _get_webhook(context, webhook_id), await context.form()
    grace_s = form.choice("grace_s", [grace for grace, _ in GRACE_CHOICES])
    if not form.errors:
        with form.refusals(FIELDS):
            webhook, secret = await context.services.alerts.webhooks.rotate(webhook_id, int(grace_s), access=context.access)
            return _secret(context, webhook, secret, "New signing secret")
    return _confirm(context, webhook, "rotate", form)


@get("/alerts/{webhook_id:str}/remove", guards=[needs(Action.WEBHOOKS)])
async def confirm_removal(context: ContextDependency, webhook_id: FromPath[str]) -> Html:
    """Confirm a removal and explain its consequences."""
    return _confirm(context, await _get_webhook(context, webhook_id), "remove", None)


@post("/alerts/{webhook_id:str}/remove", guards=[needs(Action.WEBHOOKS)], status_code=200)
async def remove_alert(context: ContextDependency, webhook_id: FromPath[str]) -> Html:
    """Remove the alert target and cancel its pending messages."""
    await context.services.alerts.webhooks.remove(webhook_id, access=context.access)
    return context.redirect("/alerts", done="alert-removed")


async def _get_webhook(context: Context, webhook_id: str, action: Action = Action.WEBHOOKS) -> Webhook:
    """Return the webhook if the member may do `action` on it. Raises NotFound and RoleNotAllowed."""
    access = context.access
    access.require_somewhere(action)
    return await context.services.alerts.webhooks.get(webhook_id, access=access, action=action)


def _read_events(form: Form, tenant_id: str | None) -> list[str]:
    """Return the checked events; adds a form error if a tenant cannot receive one of them."""
    events = [event for event in EVENTS if form.raw(event) == "yes"]
    if not events:
        form.fail("events", "Choose at least one.")
    elif tenant_id is not None and not set(events) <= set(TENANT_EVENTS):
        form.fail("events", "Engine events are sent for the whole appliance only: choose that scope, or leave them out.")
    return events


def _row(access: Access, webhook: Webhook, names: dict[str, str], failing: Collection[str]) -> dict[str, Any]:
    """Return a webhook's row in the list; only those who manage it see its full address."""
    may_manage = access.may(Action.WEBHOOKS, webhook.tenant_id)
    return {
        "webhook": webhook,
        "failing": webhook.id in failing,
        "target": webhook.target if may_manage else redact_target(webhook.kind, webhook.target),
        "tenant": names.get(webhook.tenant_id, webhook.tenant_id) if webhook.tenant_id is not None else None,
        "events": [EVENT_LABELS.get(event, event) for event in webhook.events],
    }


async def _owners(context: Context) -> list[tuple[str, str]]:
    """Return (id, name) of the tenants for which the member may add alerts; the appliance has an empty id."""
    access = context.access
    tenants = await tenants_by_name(context.services, access)
    owners = [(tenant.id, tenant.name) for tenant in tenants if not tenant.archived and access.may(Action.WEBHOOKS, tenant.id)]
    return [("", "Whole appliance: all tenants"), *owners] if access.may(Action.WEBHOOKS) else owners


async def _new_form(context: Context, form: Form | None) -> Html:
    offered = EVENTS if context.access.may(Action.WEBHOOKS) else TENANT_EVENTS
    return context.sheet(
        "fragments/alert_new.html",
        title="Add alert target",
        form=form,
        kinds=KIND_LABELS,
        owners=await _owners(context),
        choices=_choices(offered, offered),
        appliance_events=set(EVENTS) - set(TENANT_EVENTS),
    )


def _choices(checked: tuple[str, ...], offered: tuple[str, ...]) -> list[tuple[str, str, bool]]:
    return [(event, EVENT_LABELS.get(event, event), event in checked) for event in offered]


def _secret(context: Context, webhook: Webhook, secret: str, title: str) -> Html:
    return context.sheet("fragments/alert_secret.html", title=title, webhook=webhook, secret=secret)


def _confirm(context: Context, webhook: Webhook, verb: str, form: Form | None) -> Html:
    return context.sheet(
        "fragments/alert_confirm.html",
        title={"rotate": "Rotate signing secret", "remove": "Remove alert target"}[verb],
        webhook=webhook,
        verb=verb,
        graces=GRACE_CHOICES,
        form=form,
    )


async def _alert_page(context: Context, webhook: Webhook, form: Form | None = None, notice: str | None = None) -> Html:
    access = context.access
    names = await tenant_names(context.services, access)
    deliveries = await context.services.alerts.outbox.list(webhook.id, DELIVERIES_SHOWN, access=context.access)
    return context.page(
        "pages/alert.html",
        status=422 if notice else None,
        **_row(access, webhook, names, await context.services.alerts.webhooks.failing([webhook.id])),
        may_webhooks=access.may(Action.WEBHOOKS, webhook.tenant_id),
        deliveries=[(delivery, text_of(delivery.event, delivery.payload["data"]).sentence) for delivery in deliveries.data],
        deliveries_more=deliveries.has_more,
        polls=not webhook.disabled and any(_is_due(delivery, context.services.clock.now()) for delivery in deliveries.data),
        event_labels=EVENT_LABELS,
        choices=_choices(webhook.events, EVENTS if webhook.tenant_id is None else TENANT_EVENTS),
        appliance_events=(),
        form=form,
        notice=notice,
    )


def _is_due(delivery: Delivery, now: datetime) -> bool:
    """Return whether the next attempt is due so soon that the page polls for its result."""
    due = delivery.next_attempt_at
    return delivery.state == "pending" and due is not None and due - now <= POLLED_BEFORE
