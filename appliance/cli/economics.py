"""`gatehouse economics`: the cost of a million tokens on this hardware, and the break-even with hosted prices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.base.money import format_micros
from appliance.cli import output
from appliance.cli.connection import AdminClient, run
from appliance.cli.failure import CommandFailed
from appliance.cli.invoices import read_json
from appliance.cli.options import DEFAULTS, CommonOptions

BREAK_EVEN = ("name", "hosted_per_million", "break_even_tokens_month", "share", "hosted_month", "saved_month")


def economics(
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="JSON", help="Set the hardware cost from this file (format: docs/billing.md)."),
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Show the cost of a million tokens on this hardware. Includes the break-even with hosted prices and the source of each
    figure."""
    body = None if file is None else read_json(file)

    async def work(client: AdminClient) -> dict[str, Any]:
        try:
            return await client.call("GET" if body is None else "PUT", "/economics", body=body)
        except CommandFailed as failure:
            if failure.code != "not_found":
                raise
            message = "the hardware cost has not been entered yet: gatehouse economics --file JSON"
            raise CommandFailed(message, code=failure.code) from failure

    report = run(options.settings(), work)
    if options.as_json:
        output.data(report)
        return
    currency = str(report["currency"])
    output.table(
        [_figure_row(figure, currency) for figure in report["figures"]],
        ("name", "value", "unit", "source"),
        empty="There are no figures.",
    )
    output.say("")
    output.table(
        [_in_units(row) for row in report["break_even"]], BREAK_EVEN, empty="There are no hosted prices to compare with."
    )


def _figure_row(figure: dict[str, Any], currency: str) -> dict[str, Any]:
    """Return a figure as a table row, with money in units of the currency."""
    value, unit = figure["value"], str(figure["unit"])
    if value is not None:
        value = _money(value) if unit.startswith("micro-units") else f"{value:,}"
    return {**figure, "value": value, "unit": unit.replace("micro-units", currency)}


def _in_units(row: dict[str, Any]) -> dict[str, Any]:
    amounts = {name.removesuffix("_micros"): _money(row[name]) for name in row if name.endswith("_micros")}
    share = row["share_basis_points"]
    needed = row["break_even_tokens_month"]
    return {
        "name": row["name"],
        **amounts,
        "break_even_tokens_month": None if needed is None else f"{needed:,}",
        "share": None if share is None else f"{share / 100:.2f} %",
    }


def _money(micros: int | None) -> str | None:
    return None if micros is None else format_micros(micros)
