"""`gatehouse prices`: list, add and withdraw prices. A price never changes; only a future one can be withdrawn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from appliance.base.digits import whole_number
from appliance.base.money import PERCENT_MAX
from appliance.cli import output
from appliance.cli.configured_models import note_unserved, served_models
from appliance.cli.connection import AdminClient, run
from appliance.cli.failure import WrongUsage
from appliance.cli.options import DEFAULTS, CommonOptions

app = typer.Typer(help="Manage prices (millionths of the currency per million tokens).", no_args_is_help=True)

COLUMNS = (
    "id", "model", "effective_from", "currency", "prompt", "cached_prompt", "completion", "rejected_draft", "batch_percent",
    "tier_percents",
)  # fmt: skip


@app.command("list")
def list_prices(
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Only this model.")] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List all prices, past and future, in the order they were added."""
    prices = run(options.settings(), lambda client: client.list_all("/prices"))
    rows = [price for price in prices if model in (None, price["model"])]
    empty = "There are no prices: requests cost nothing."
    output.rows(rows, COLUMNS, empty=empty, as_json=options.as_json)


@app.command("add")
def add(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model's name, as used in requests.")],
    prompt: Annotated[int, typer.Option(metavar="MICROS", help="Price per million prompt tokens.")],
    completion: Annotated[int, typer.Option(metavar="MICROS", help="Price per million output tokens.")],
    cached_prompt: Annotated[
        int | None, typer.Option(metavar="MICROS", help="Price per million cached prompt tokens; default: --prompt.")
    ] = None,
    rejected_draft: Annotated[
        int, typer.Option(metavar="MICROS", help="Price per million rejected draft tokens of speculative decoding.")
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
    """Add a price in millionths of the currency per million tokens. 150000 is 0.15. Earlier prices are kept, and settled usage
    keeps its cost."""
    optional = {"cached_prompt": cached_prompt, "currency": currency, "effective_from": effective_from}
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "completion": completion,
        "rejected_draft": rejected_draft,
        "batch_percent": batch_percent,
        "tier_percents": _tiers(tier_percent),
    } | {name: value for name, value in optional.items() if value is not None}

    settings = options.settings()

    async def work(client: AdminClient) -> tuple[dict[str, Any], Sequence[str]]:
        return await client.call("POST", "/prices", body=body), await served_models(client, settings)

    price, served = run(settings, work)
    output.row(price, COLUMNS, as_json=options.as_json)
    note_unserved(model, served, "its price applies when one does")


@app.command("withdraw")
def withdraw(
    price_id: Annotated[str, typer.Argument(metavar="ID", help="The price's id, from `prices list`.")],
    options: CommonOptions = DEFAULTS,
) -> None:
    """Withdraw a price that is not yet in force. To replace one that is in force, add a new price."""
    path = f"/prices/{quote(price_id, safe='')}"
    price = run(options.settings(), lambda client: client.call("DELETE", path))
    output.row(price, COLUMNS, as_json=options.as_json)
    if not options.as_json:
        sys.stderr.write("This price was withdrawn: it never takes effect.\n")


def _tiers(given: list[str] | None) -> dict[str, int] | None:
    """Parse `TIER=PERCENT` options into the API's field."""
    percents: dict[str, int] = {}
    for text in given or []:
        tier, _, number = text.partition("=")
        percent = whole_number(number, PERCENT_MAX)
        if percent is None:
            raise WrongUsage(f"--tier-percent must be TIER=PERCENT with 0 to {PERCENT_MAX}, such as batch=50, not {text!r}")
        percents[tier] = percent
    return percents or None
