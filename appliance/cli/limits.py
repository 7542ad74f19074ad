"""`gatehouse limits`: the admission wait of each tier, and limits on a model across all tenants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from appliance.base.errors import NotFound
from appliance.base.texts import did_you_mean
from appliance.cli import output
from appliance.cli.configured_models import note_unserved, served_models
from appliance.cli.connection import AdminClient, run
from appliance.cli.failure import CommandFailed
from appliance.cli.limit_options import NO_LIMITS, LimitOptions, ModeOption
from appliance.cli.options import DEFAULTS, CommonOptions
from appliance.cli.tenants import with_readable_budgets
from appliance.tenancy.fields import TIERS, check_choice

app = typer.Typer(help="Set the admission wait of tiers, and limits of models.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name, as used in requests.")]


@app.command("tiers")
def list_tiers(options: CommonOptions = DEFAULTS) -> None:
    """List the tiers and their admission waits."""
    _list("/tiers", ("name", "admission_wait_ms"), "There are no tiers.", options)


@app.command("tier")
def change_tier(
    name: Annotated[str, typer.Argument(metavar="TIER", help="The tier: interactive, standard or batch.")],
    admission_wait_ms: Annotated[
        int,
        typer.Option(metavar="MS", help="How long a request waits for room in its limits before it is refused, 0 to 60000."),
    ],
    options: CommonOptions = DEFAULTS,
) -> None:
    """Change the admission wait of a tier."""
    check_choice(name, "tier", TIERS)
    body = {"admission_wait_ms": admission_wait_ms}
    path = f"/tiers/{quote(name, safe='')}"
    _print(run(options.settings(), lambda client: client.call("PATCH", path, body=body)), options)


@app.command("models")
def list_models(options: CommonOptions = DEFAULTS) -> None:
    """List the models with limits across all tenants."""
    columns = ("model", "limits", "limit_mode", "updated_at")
    _list("/model-limits", columns, "No model has limits.", options)


@app.command("model")
def limit_model(
    model: Model,
    limits: LimitOptions = NO_LIMITS,
    mode: ModeOption = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Set the limits of a model across all tenants. Limits that are not given are removed."""
    body: dict[str, Any] = {"limits": {}} | limits.body() | ({} if mode is None else {"limit_mode": mode})
    settings = options.settings()

    async def work(client: AdminClient) -> tuple[Mapping[str, Any], Sequence[str]]:
        answer = await client.call("PUT", f"/model-limits/{quote(model)}", body=body)
        return answer, await served_models(client, settings)

    answer, served = run(settings, work)
    _print(answer, options)
    note_unserved(model, served, "its limits apply when one does")


@app.command("free-model")
def free_model(model: Model, options: CommonOptions = DEFAULTS) -> None:
    """Remove the limits of a model across all tenants."""

    async def work(client: AdminClient) -> Mapping[str, Any]:
        limited = [row["model"] for row in await client.list_all("/model-limits")]
        if model not in limited:
            raise CommandFailed(f"{model!r} has no limits{did_you_mean(model, limited)}", code=NotFound.code)
        return await client.call("DELETE", f"/model-limits/{quote(model)}")

    _print(run(options.settings(), work), options, note="These limits were removed.")


def _list(path: str, columns: tuple[str, ...], empty: str, options: CommonOptions) -> None:
    settings = options.settings()
    rows = run(settings, lambda client: client.call("GET", path))["data"]
    output.rows(rows, columns, empty=empty, as_json=options.as_json, line=lambda row: _readable(row, settings.currency))


def _print(answer: Mapping[str, Any], options: CommonOptions, *, note: str = "") -> None:
    readable = answer if options.as_json else _readable(answer, options.settings().currency)
    output.item(readable, as_json=options.as_json, note=note)


def _readable(row: Mapping[str, Any], currency: str) -> Mapping[str, Any]:
    return with_readable_budgets(row, currency) if "limits" in row else row
