"""`gatehouse tenants`: list, create, show, update, archive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.base.ids import is_id
from appliance.base.money import PICOS_PER_MICRO, format_exactly
from appliance.cli import output
from appliance.cli.confirmation import Yes, ask_for_name, needs_terminal
from appliance.cli.connection import AdminClient, Work, run
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.limit_options import NO_OWNER_LIMITS, OwnerLimitOptions
from appliance.cli.options import DEFAULTS, CommonOptions

if TYPE_CHECKING:
    from appliance.base.settings import Settings

app = typer.Typer(help="Tenants, their limits and their billing.", no_args_is_help=True)

COLUMNS = ("id", "name", "tier", "weight", "limits", "limit_mode", "allowed_models", "suspended", "archived", "created_at")
ARCHIVED = "Its keys are refused and it is hidden from lists, permanently. Its ledger and its invoices are kept."

OnlyTenant = Annotated[str | None, typer.Option("--tenant", metavar="TENANT", help="Only this tenant (id or name).")]
Which = Annotated[str, typer.Argument(metavar="TENANT", help="A tenant's id or name.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TermOptions:
    """The options for a tenant's terms: how it is billed, and when it is warned and cut."""

    cut_at_budget: Annotated[
        bool | None,
        typer.Option(
            "--cut-at-budget/--finish-at-budget", help="End running answers when a monthly budget is spent, or let them finish."
        ),
    ] = None
    currency: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="Billing currency, such as EUR; cannot be changed after the first request (default: the appliance's).",
        ),
    ] = None
    billing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=TEXT",
            help="A field of the buyer: name, address, country, email, tax_id or reference; repeatable; "
            "replaces the whole buyer.",
        ),
    ] = None
    alert_percent: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Alert at this percentage of the budget or tokens per day; repeatable."),
    ] = None

    def body(self) -> dict[str, Any]:
        """Return the fields that were given. Raises WrongUsage."""
        terms: dict[str, Any] = {"cut_at_budget": self.cut_at_budget, "currency": self.currency}
        terms |= {"alert_percents": self.alert_percent or None, "billing": _billing(self.billing) if self.billing else None}
        return {name: value for name, value in terms.items() if value is not None}


NO_TERMS = TermOptions()


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
    limits: OwnerLimitOptions = NO_OWNER_LIMITS,
    terms: TermOptions = NO_TERMS,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Create a tenant."""
    body = {"name": name, "tier": tier, "weight": weight} | limits.body() | terms.body()
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
    limits: OwnerLimitOptions = NO_OWNER_LIMITS,
    terms: TermOptions = NO_TERMS,
    suspended: Annotated[
        bool | None, typer.Option("--suspend/--resume", help="Refuse its requests, or serve them again.")
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Change a tenant. What is not named stays as it is."""
    named = {"name": name, "tier": tier, "weight": weight, "suspended": suspended}
    body = {field: value for field, value in named.items() if value is not None} | limits.body() | terms.body()
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


def _billing(given: list[str]) -> dict[str, str]:
    fields = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise WrongUsage(f"--billing takes FIELD=TEXT, not {text!r}")
        fields[name] = value.replace("\\n", "\n")
    return fields


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
