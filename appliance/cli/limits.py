"""`gatehouse limits`: how long requests of each tier may wait for room, and what all tenants together may use of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer

from appliance.cli import output
from appliance.cli.connection import run
from appliance.cli.options import AsJson, DatabaseUrl, DataDir, settings_from
from appliance.cli.tenants import BudgetOption, LimitOption, ModeOption, limits_body, with_money
from appliance.tenancy.fields import TIERS, check_choice

app = typer.Typer(help="Limits of tiers and of models, across tenants.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model's name, as in requests.")]


@app.command("tiers")
def list_tiers(as_json: AsJson = False, data_dir: DataDir = None, database: DatabaseUrl = None) -> None:
    """List the tiers."""
    _list("/tiers", ("name", "admission_wait_ms"), "There are no tiers.", as_json=as_json, data_dir=data_dir, database=database)


@app.command("tier")
def change_tier(
    name: Annotated[str, typer.Argument(metavar="TIER", help="interactive, standard or batch.")],
    admission_wait_ms: Annotated[
        int, typer.Option(metavar="MS", help="How long a request waits for room before it is refused: 0 to 60000 ms.")
    ],
    as_json: AsJson = False,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Change a tier."""
    check_choice(name, "tier", TIERS)
    body = {"admission_wait_ms": admission_wait_ms}
    _call("PATCH", f"/tiers/{quote(name, safe='')}", body, as_json=as_json, data_dir=data_dir, database=database)


@app.command("models")
def list_models(as_json: AsJson = False, data_dir: DataDir = None, database: DatabaseUrl = None) -> None:
    """List the models that have limits for all tenants together."""
    columns = ("model", "limits", "limit_mode", "updated_at")
    _list("/model-limits", columns, "No model has limits.", as_json=as_json, data_dir=data_dir, database=database)


@app.command("model")
def limit_model(
    model: Model,
    tokens_per_minute: LimitOption = None,
    requests_per_minute: LimitOption = None,
    concurrent_requests: LimitOption = None,
    tokens_per_day: LimitOption = None,
    monthly_budget: BudgetOption = None,
    mode: ModeOption = None,
    as_json: AsJson = False,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
) -> None:
    """Set the limits of a model for all tenants together. Limits that are not named are removed."""
    given = limits_body(
        tokens_per_minute=tokens_per_minute,
        requests_per_minute=requests_per_minute,
        concurrent_requests=concurrent_requests,
        tokens_per_day=tokens_per_day,
        monthly_budget=monthly_budget,
    )
    body: dict[str, Any] = {"limits": given.get("limits", {})} | ({} if mode is None else {"limit_mode": mode})
    _call("PUT", f"/model-limits/{quote(model)}", body, as_json=as_json, data_dir=data_dir, database=database)


@app.command("free-model")
def free_model(model: Model, as_json: AsJson = False, data_dir: DataDir = None, database: DatabaseUrl = None) -> None:
    """Remove the limits of a model."""
    _call("DELETE", f"/model-limits/{quote(model)}", as_json=as_json, data_dir=data_dir, database=database)


def _list(
    path: str, columns: tuple[str, ...], empty: str, *, as_json: bool, data_dir: str | None, database: str | None
) -> None:
    settings = settings_from(data_dir, database)
    rows = run(settings, lambda client: client.call("GET", path))["data"]
    output.rows(rows, columns, empty=empty, as_json=as_json, line=lambda row: _readable(row, settings.currency))


def _call(method: str, path: str, body: object = None, *, as_json: bool, data_dir: str | None, database: str | None) -> None:
    settings = settings_from(data_dir, database)
    answer = run(settings, lambda client: client.call(method, path, body=body))
    output.item(answer if as_json else _readable(answer, settings.currency), as_json=as_json)


def _readable(row: Mapping[str, Any], currency: str) -> Mapping[str, Any]:
    return with_money(row, currency) if "limits" in row else row
