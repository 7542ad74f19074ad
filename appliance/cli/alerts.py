"""`gatehouse alerts`: alert targets, test alerts and deliveries."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from appliance.cli import output
from appliance.cli.connection import AdminClient, read_control, run
from appliance.cli.failure import CommandFailed
from appliance.cli.options import DEFAULTS, LIMIT_DEFAULT, CommonOptions, Limit
from appliance.cli.tenants import TenantFilter, tenant_field

app = typer.Typer(help="Manage alerts by signed webhook or e-mail.", no_args_is_help=True)

COLUMNS = ("id", "tenant_id", "kind", "target", "events", "disabled", "created_at")
DELIVERY_COLUMNS = ("id", "event", "state", "attempts", "next_attempt_at", "delivered_at", "last_error", "created_at")
KEEP_IT = "Save the secret now: it is not shown again."
POLLS_MAX = 50
POLL_S = 0.4  # an HTTP attempt times out after 15 s

WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="The webhook's id.")]


@app.command("list")
def list_webhooks(tenant: TenantFilter = None, options: CommonOptions = DEFAULTS) -> None:
    """List the alert targets."""

    async def work(client: AdminClient) -> list[dict[str, Any]]:
        return await client.list_all("/webhooks", query=await tenant_field(client, tenant))

    rows = run(options.settings(), work)
    empty = "There are no alert targets. Add one: gatehouse alerts add https://example.com/alerts"
    output.rows(rows, COLUMNS, empty=empty, as_json=options.as_json)


@app.command("add")
def add(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An https:// URL, or an e-mail address.")],
    tenant: TenantFilter = None,
    event: Annotated[
        list[str] | None,
        typer.Option(metavar="EVENT", help="Only this event, such as invoice.closed; repeatable; default: all."),
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Add an alert target: a URL or an e-mail address. Prints a URL's signing secret once."""

    async def work(client: AdminClient) -> dict[str, Any]:
        kind = "email" if "@" in target and "://" not in target else "webhook"
        body = {"kind": kind, "target": target, "events": event or None}
        return await client.call("POST", "/webhooks", body=body | await tenant_field(client, tenant))

    _print_secret(run(options.settings(), work), as_json=options.as_json)


@app.command("rotate")
def rotate(
    webhook: WebhookId,
    grace_s: Annotated[
        int, typer.Option(metavar="SECONDS", help="How long the previous secret signs too, 0 to 604800.")
    ] = 86400,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Rotate a webhook's signing secret and print the new one once."""
    path, body = f"/webhooks/{webhook}/rotate", {"grace_s": grace_s}
    rotated = run(options.settings(), lambda client: client.call("POST", path, body=body))
    _print_secret(rotated, as_json=options.as_json)


@app.command("remove")
def remove(webhook: WebhookId, options: CommonOptions = DEFAULTS) -> None:
    """Remove a webhook and cancel its pending deliveries."""
    removed = run(options.settings(), lambda client: client.call("DELETE", f"/webhooks/{webhook}"))
    output.item(removed, as_json=options.as_json, note="This webhook was removed: it gets no more messages.")


@app.command("test")
def send_test(webhook: WebhookId, options: CommonOptions = DEFAULTS) -> None:
    """Send a test alert and wait for the first attempt. Exit status 1 if it fails."""
    settings = options.settings()
    if read_control(settings.data_dir) is None:
        raise CommandFailed("the appliance is not running, so no alert would be sent", code="not_running")

    async def work(client: AdminClient) -> dict[str, Any]:
        sent = await client.call("POST", f"/webhooks/{webhook}/test")
        return await _first_attempt(client, f"/webhooks/{webhook}/deliveries/{sent['id']}")

    delivery = run(settings, work)
    output.item({name: delivery[name] for name in DELIVERY_COLUMNS}, as_json=options.as_json)
    if delivery["state"] != "delivered":
        raise typer.Exit(1)


@app.command("deliveries")
def deliveries(
    webhook: WebhookId,
    state: Annotated[str | None, typer.Option(metavar="STATE", help="Only this state: pending, delivered or failed.")] = None,
    limit: Limit = LIMIT_DEFAULT,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List a webhook's deliveries, newest first."""
    from appliance.serving.alerting.texts import text_of

    path, query = f"/webhooks/{webhook}/deliveries", {"state": state}
    rows, has_more = run(options.settings(), lambda client: client.list_first(path, limit, query=query))
    output.rows(
        rows,
        (*DELIVERY_COLUMNS, "about"),
        empty="There are no deliveries yet. Send a test: gatehouse alerts test WEBHOOK",
        as_json=options.as_json,
        line=lambda row: {**row, "about": text_of(row["event"], row["payload"]["data"]).headline},
        has_more=has_more,
    )


@app.command("retry")
def retry(
    webhook: WebhookId,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="The delivery's id.")],
    options: CommonOptions = DEFAULTS,
) -> None:
    """Retry a delivery under the same id."""
    path = f"/webhooks/{webhook}/deliveries/{delivery}/retry"
    sent = run(options.settings(), lambda client: client.call("POST", path))
    output.item({name: sent[name] for name in DELIVERY_COLUMNS}, as_json=options.as_json)


async def _first_attempt(client: AdminClient, path: str) -> dict[str, Any]:
    """Return the delivery once its first attempt has ended, or its state after POLLS_MAX polls."""
    for _ in range(POLLS_MAX):
        delivery = await client.call("GET", path)
        if delivery["state"] != "pending" or delivery["last_error"] is not None:
            break
        await asyncio.sleep(POLL_S)
    return delivery


def _print_secret(webhook: dict[str, Any], *, as_json: bool) -> None:
    secret = {"secret": webhook["secret"]} if webhook["secret"] is not None else {}
    shown = {**secret, **{name: webhook[name] for name in COLUMNS}}
    output.item(webhook if as_json else shown, as_json=as_json, note=KEEP_IT if secret else "")
