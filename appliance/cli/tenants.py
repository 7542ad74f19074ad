"""`gatehouse tenants`: list, create, show, update, archive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.base.ids import is_id
from appliance.base.money import PICOS_PER_MICRO, format_exactly
from appliance.cli import output
from appliance.cli.confirmation import Yes, ask_for_name, needs_terminal
from appliance.cli.connection import AdminClient, Work, run
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.options import DEFAULTS, CommonOptions
from appliance.tenancy.fields import LIMIT_MAX
from appliance.tenancy.principals import LIMIT_NAMES

if TYPE_CHECKING:
    from appliance.base.settings import Settings

app = typer.Typer(help="Tenants, their limits and their billing.", no_args_is_help=True)

COLUMNS = ("id", "name", "tier", "weight", "limits", "limit_mode", "allowed_models", "suspended", "archived", "created_at")
ARCHIVED = "Its keys are refused and it is hidden from lists, permanently. Its ledger and its invoices are kept."

Which = Annotated[str, typer.Argument(metavar="TENANT", help="A tenant's id or name.")]
LimitOption = Annotated[str | None, typer.Option(metavar="N", help="A whole number, or `none` for no limit.")]
BudgetOption = Annotated[
    str | None,
    typer.Option(metavar="MICROS", help="In millionths of the currency (5000000 is 5.00 EUR), or `none` for no limit."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """The options for limits of a tenant, a key or a model."""

    tokens_per_minute: LimitOption = None
    requests_per_minute: LimitOption = None
    concurrent_requests: LimitOption = None
    tokens_per_day: LimitOption = None
    monthly_budget: BudgetOption = None


NO_LIMITS = LimitOptions()
ModelOption = Annotated[
    list[str] | None, typer.Option("--model", metavar="NAME", help="An allowed model; repeatable; `all` for every model.")
]
ModelLimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model-limit",
        metavar="MODEL:LIMIT=N",
        help="A limit for a single model, as in large:tokens_per_minute=1000; a budget in millionths of the currency; "
        "repeatable; `none` lifts all of them.",
    ),
]
ModeOption = Annotated[
    str | None,
    typer.Option("--limit-mode", metavar="MODE", help="enforce, or shadow: count requests over a limit and serve them."),
]
CurrencyOption = Annotated[
    str | None,
    typer.Option(
        metavar="CODE",
        help="Billing currency, such as EUR; cannot be changed after the first request (default: the appliance's).",
    ),
]
CutOption = Annotated[
    bool | None,
    typer.Option(
        "--cut-at-budget/--finish-at-budget", help="End running answers when a monthly budget is spent, or let them finish."
    ),
]
BillingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--billing",
        metavar="FIELD=TEXT",
        help="A field of the buyer: name, address, country, email, tax_id or reference; repeatable; replaces the whole buyer.",
    ),
]
AlertOption = Annotated[
    list[int] | None,
    typer.Option("--alert-percent", metavar="N", help="Alert at this percentage of the budget or tokens per day; repeatable."),
]


@app.command("list")
def list_tenants(
    archived: Annotated[bool, typer.Option("--archived", help="Show archived tenants too.")] = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List tenants."""
    query = {"include_archived": "true"} if archived else {}
    settings = options.settings()
    rows = run(settings, lambda client: client.every("/tenants", query=query))
    empty = "There are no tenants. Create one: gatehouse tenants create NAME"
    output.rows(rows, COLUMNS, empty=empty, as_json=options.as_json, line=lambda row: with_money(row, settings.currency))


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the new tenant.")],
    tier: Annotated[str, typer.Option(help="interactive, standard or batch.")] = "standard",
    weight: Annotated[int, typer.Option(help="Weight among tenants of the same tier, 1 to 1000.")] = 1,
    limits: LimitOptions = NO_LIMITS,
    model: ModelOption = None,
    model_limit: ModelLimitOption = None,
    limit_mode: ModeOption = None,
    cut_at_budget: CutOption = None,
    currency: CurrencyOption = None,
    billing: BillingOption = None,
    alert_percent: AlertOption = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Create a tenant."""
    body = {"name": name, "tier": tier, "weight": weight} | models_body(model) | model_limits_body(model_limit)
    body |= _terms(limit_mode, currency, billing, alert_percent, cut_at_budget=cut_at_budget)
    body |= limits_body(limits)
    settings = options.settings()
    _print(run(settings, lambda client: client.call("POST", "/tenants", body=body)), settings, as_json=options.as_json)


@app.command("show")
def show(which: Which, options: CommonOptions = DEFAULTS) -> None:
    """Show one tenant."""
    settings = options.settings()
    _print(run(settings, lambda client: find(client, which)), settings, as_json=options.as_json)


@app.command("update")
def update(
    which: Which,
    name: Annotated[str | None, typer.Option(help="A new name.")] = None,
    tier: Annotated[str | None, typer.Option(help="interactive, standard or batch.")] = None,
    weight: Annotated[int | None, typer.Option(help="Weight among tenants of the same tier, 1 to 1000.")] = None,
    limits: LimitOptions = NO_LIMITS,
    model: ModelOption = None,
    model_limit: ModelLimitOption = None,
    limit_mode: ModeOption = None,
    cut_at_budget: CutOption = None,
    currency: CurrencyOption = None,
    billing: BillingOption = None,
    alert_percent: AlertOption = None,
    suspended: Annotated[
        bool | None, typer.Option("--suspend/--resume", help="Refuse its requests, or serve them again.")
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Change a tenant. What is not named stays as it is."""
    named = {"name": name, "tier": tier, "weight": weight, "suspended": suspended}
    body: dict[str, Any] = {field: value for field, value in named.items() if value is not None} | models_body(model)
    body |= model_limits_body(model_limit)
    body |= _terms(limit_mode, currency, billing, alert_percent, cut_at_budget=cut_at_budget)
    body |= limits_body(limits)
    if not body:
        raise WrongUsage("nothing to change: name at least one option (gatehouse tenants update --help)")

    settings = options.settings()
    _print(run(settings, at_tenant(which, "PATCH", body=body)), settings, as_json=options.as_json)


@app.command("archive")
def archive(which: Which, yes: Yes = False, options: CommonOptions = DEFAULTS) -> None:
    """Archive a tenant permanently. Asks for its name; usage and invoices are kept."""
    settings = options.settings()
    if not yes:
        needs_terminal("archiving a tenant cannot be undone")
        tenant = run(settings, lambda client: find(client, which))
        if not tenant["archived"]:
            ask_for_name(tenant["name"], ARCHIVED)
        which = tenant["id"]
    _print(run(settings, at_tenant(which, "DELETE")), settings, as_json=options.as_json)


def limits_body(given: LimitOptions) -> dict[str, Any]:
    """Return the field `limits` if any was given, each by its name; `none` removes one. Raises WrongUsage."""
    limits: dict[str, int | None] = {}
    for field, value in asdict(given).items():
        if value is None:
            continue
        if value.lower() == "none":
            limits[field] = None
        elif _is_limit(value):
            limits[field] = int(value)
        else:
            option = "--" + field.replace("_", "-")
            message = f"{option} must be a whole number from 0 to {LIMIT_MAX} or `none`, not {value!r}"
            raise WrongUsage(message)
    return {"limits": limits} if limits else {}


def _is_limit(value: str) -> bool:
    return value.isascii() and value.isdigit() and len(value) <= len(str(LIMIT_MAX)) and int(value) <= LIMIT_MAX


def model_limits_body(given: list[str] | None) -> dict[str, Any]:
    """Return the field `model_limits` if any was given: the whole set, because it replaces the former one."""
    if not given:
        return {}
    if given == ["none"]:
        return {"model_limits": None}
    limits: dict[str, dict[str, int]] = {}
    for text in given:
        model, _, setting = text.rpartition(":")
        name, _, value = setting.partition("=")
        if not model or name not in LIMIT_NAMES or not _is_limit(value):
            expected = (
                f"MODEL:LIMIT=N, where LIMIT is one of {', '.join(LIMIT_NAMES)} and N a whole number from 0 to {LIMIT_MAX}"
            )
            raise WrongUsage(f"--model-limit takes {expected}, not {text!r}")
        limits.setdefault(model, {})[name] = int(value)
    return {"model_limits": limits}


def _terms(
    limit_mode: str | None,
    currency: str | None,
    billing: list[str] | None,
    alert_percents: list[int] | None,
    *,
    cut_at_budget: bool | None,
) -> dict[str, Any]:
    """Return the given fields of a tenant's terms: how it is limited and billed."""
    terms: dict[str, Any] = {"limit_mode": limit_mode, "cut_at_budget": cut_at_budget, "currency": currency}
    terms |= {"alert_percents": alert_percents or None, "billing": _billing(billing) if billing else None}
    return {name: value for name, value in terms.items() if value is not None}


def _billing(given: list[str]) -> dict[str, str]:
    fields = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise WrongUsage(f"--billing takes FIELD=TEXT, not {text!r}")
        fields[name] = value.replace("\\n", "\n")
    return fields


def models_body(models: list[str] | None) -> dict[str, Any]:
    """Return the field `allowed_models` if models were named; `all` removes the restriction."""
    if not models:
        return {}
    return {"allowed_models": None if models == ["all"] else models}


def at_tenant(which: str, method: str, below: str = "", *, body: object = None) -> Work:
    """Return work that calls the path `below` the tenant with this id or name."""

    async def work(client: AdminClient) -> dict[str, Any]:
        tenant = await find(client, which)
        return await client.call(method, f"/tenants/{tenant['id']}{below}", body=body)

    return work


async def tenant_field(client: AdminClient, which: str | None) -> dict[str, str]:
    """Return the field `tenant_id` if a tenant was named."""
    return {} if which is None else {"tenant_id": (await find(client, which))["id"]}


async def find(client: AdminClient, which: str) -> dict[str, Any]:
    """Return the tenant with this id or this exact name."""
    if is_id(which, "tn") and (found := await client.find("/tenants", which)) is not None:
        return found
    rows: list[dict[str, Any]] = await client.every("/tenants", query={"include_archived": "true"})
    for tenant in rows:
        if which in (tenant["id"], tenant["name"]):
            return tenant
    raise CommandFailed(f"no tenant {which!r}", code="not_found")


def with_money(owner: Mapping[str, Any], currency: str) -> dict[str, Any]:
    """Return a tenant or key with its budgets as money for a person, in its own currency or else in `currency`."""
    money = owner.get("currency") or currency
    readable = {**owner, "limits": _with_money(owner["limits"], money)}
    if owner.get("model_limits"):
        readable["model_limits"] = {model: _with_money(limits, money) for model, limits in owner["model_limits"].items()}
    return readable


def _with_money(limits: Mapping[str, Any], currency: str) -> dict[str, Any]:
    budget = limits.get("monthly_budget")
    return dict(limits) if budget is None else {**limits, "monthly_budget": format_exactly(budget * PICOS_PER_MICRO, currency)}


def _print(tenant: Mapping[str, Any], settings: Settings, *, as_json: bool) -> None:
    output.item(tenant if as_json else with_money(tenant, settings.currency), as_json=as_json)
