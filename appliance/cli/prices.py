"""`gatehouse prices`: what tokens cost, from when on. Prices are added, never changed; a future one can be withdrawn."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from appliance.base.digits import whole_number
from appliance.base.money import PERCENT_MAX
from appliance.cli import output
from appliance.cli.connection import run
from appliance.cli.failure import WrongUsage
from appliance.cli.options import DEFAULTS, CommonOptions

app = typer.Typer(help="Prices of models, in micro-units of money per million tokens.", no_args_is_help=True)

COLUMNS = (
    "id", "model", "effective_from", "currency", "prompt", "cached_prompt", "completion", "rejected_draft", "batch_percent",
    "tier_percents",
)  # fmt: skip


@app.command("list")
def list_prices(
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List all prices, in the order they were added. Includes past and future ones."""
    prices = run(options.settings(), lambda client: client.every("/prices"))
    rows = [price for price in prices if model in (None, price["model"])]
    empty = "There are no prices: requests cost nothing."
    output.rows(rows, COLUMNS, empty=empty, as_json=options.as_json)


@app.command("add")
def add(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name, as in requests.")],
    prompt: Annotated[int, typer.Option(metavar="MICROS", help="Price per million prompt tokens.")],
    completion: Annotated[int, typer.Option(metavar="MICROS", help="Price per million output tokens.")],
    cached_prompt: Annotated[
        int | None, typer.Option(metavar="MICROS", help="Price per million cached prompt tokens; default: --prompt.")
    ] = None,
    rejected_draft: Annotated[
        int, typer.Option(metavar="MICROS", help="Price per million rejected tokens of speculative decoding.")
    ] = 0,
    currency: Annotated[
        str | None, typer.Option(metavar="CODE", help="Currency, such as EUR; default: the appliance's.")
    ] = None,
    effective_from: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="TIME", help="When it takes effect (RFC 3339), which may be in the future; default: now."
        ),
    ] = None,
    batch_percent: Annotated[
        int, typer.Option(metavar="PERCENT", help="Percentage of the price that batch work (service tier flex) pays.")
    ] = 100,
    tier_percent: Annotated[
        list[str] | None, typer.Option(metavar="TIER=PERCENT", help="Percentage of the price that a tier pays; repeatable.")
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Add a price. It is in millionths of the currency per million tokens: 150000 is 0.15. Earlier prices are kept, and settled
    usage keeps its cost."""
    optional = {"cached_prompt": cached_prompt, "currency": currency, "effective_from": effective_from}
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "completion": completion,
        "rejected_draft": rejected_draft,
        "batch_percent": batch_percent,
        "tier_percents": _tiers(tier_percent),
    } | {name: value for name, value in optional.items() if value is not None}

    price = run(options.settings(), lambda client: client.call("POST", "/prices", body=body))
    output.row(price, COLUMNS, as_json=options.as_json)


@app.command("withdraw")
def withdraw(
    price_id: Annotated[str, typer.Argument(metavar="ID", help="The price's id, as `prices list` shows it.")],
    options: CommonOptions = DEFAULTS,
) -> None:
    """Withdraw a price not yet in force. To replace one that is in force, add a new price."""
    path = f"/prices/{quote(price_id, safe='')}"
    price = run(options.settings(), lambda client: client.call("DELETE", path))
    output.row(price, COLUMNS, as_json=options.as_json)


def _tiers(given: list[str] | None) -> dict[str, int] | None:
    """Return `tier=percent` texts as the API takes them."""
    percents: dict[str, int] = {}
    for text in given or []:
        tier, _, number = text.partition("=")
        percent = whole_number(number, PERCENT_MAX)
        if percent is None:
            raise WrongUsage(f"--tier-percent must be like batch=50, with 0 to {PERCENT_MAX} percent, not {text!r}")
        percents[tier] = percent
    return percents or None
