"""`gatehouse tenants`: list, create, show, update and archive tenants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.base.ids import is_id
from appliance.base.money import PICOS_PER_MICRO, format_exactly
from appliance.base.texts import did_you_mean
from appliance.cli import output
from appliance.cli.confirmation import Yes, ask_for_name, require_terminal
from appliance.cli.connection import AdminClient, Work, run
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.limit_options import NO_OWNER_LIMITS, OwnerLimitOptions
from appliance.cli.options import DEFAULTS, CommonOptions

if TYPE_CHECKING:
    from appliance.base.settings import Settings

app = typer.Typer(help="Manage tenants, their limits and their billing.", no_args_is_help=True)

COLUMNS = ("id", "name", "tier", "weight", "limits", "limit_mode", "allowed_models", "suspended", "archived", "created_at")
ARCHIVE_EFFECT = (
    "From now on its keys are refused and it is hidden from lists. This cannot be undone. Its ledger and invoices are kept."
)

TenantFilter = Annotated[str | None, typer.Option("--tenant", metavar="TENANT", help="Only this tenant (id or name).")]
TenantArgument = Annotated[str, typer.Argument(metavar="TENANT", help="The tenant's id or name.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TermOptions:
    """The billing terms of a tenant: currency, buyer, alerts, and what happens when a budget is spent."""

    cut_at_budget: Annotated[
        bool | None,
        typer.Option(
            "--cut-at-budget/--finish-at-budget",
            help="When a monthly budget is spent, end running answers, or let them finish.",
        ),
    ] = None
    currency: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="Billing currency, such as EUR; fixed after the first request; default: the appliance's.",
        ),
    ] = None
    billing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD=TEXT",
            help="Field of the buyer on invoices: name, address, country, email, tax_id or reference; repeatable; "
            "replaces all of them.",
        ),
    ] = None
    alert_percent: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Alert at this percentage of a budget or of the tokens per day; repeatable."),
    ] = None

    def body(self) -> dict[str, Any]:
        """Return the fields that were given. Raises WrongUsage."""
        terms: dict[str, Any] = {"cut_at_budget": self.cut_at_budget, "currency": self.currency}
        terms |= {"alert_percents": self.alert_percent or None, "billing": _billing(self.billing) if self.billing else None}
        return {name: value for name, value in terms.items() if value is not None}


NO_TERMS = TermOptions()


@app.command("list")
def list_tenants(
    archived: Annotated[bool, typer.Option("--archived", help="Include archived tenants.")] = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """List the tenants."""
    query = {"include_archived": "true"} if archived else {}
    settings = options.settings()
    rows = run(settings, lambda client: client.list_all("/tenants", query=query))
    empty = "There are no tenants. Create one: gatehouse tenants create NAME"
    output.rows(
        rows, COLUMNS, empty=empty, as_json=options.as_json, line=lambda row: with_readable_budgets(row, settings.currency)
    )


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new tenant's name.")],
    tier: Annotated[str, typer.Option(metavar="TIER", help="Priority tier: interactive, standard or batch.")] = "standard",
    weight: Annotated[int, typer.Option(metavar="N", help="Weight among tenants of the same tier, 1 to 1000.")] = 1,
    limits: OwnerLimitOptions = NO_OWNER_LIMITS,
    terms: TermOptions = NO_TERMS,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Create a tenant."""
    body = {"name": name, "tier": tier, "weight": weight} | limits.body() | terms.body()
    settings = options.settings()
    _print(run(settings, lambda client: client.call("POST", "/tenants", body=body)), settings, as_json=options.as_json)


@app.command("show")
def show(which: TenantArgument, options: CommonOptions = DEFAULTS) -> None:
    """Show one tenant."""
    settings = options.settings()
    _print(run(settings, lambda client: find_tenant(client, which)), settings, as_json=options.as_json)


@app.command("update")
def update(
    which: TenantArgument,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="New name.")] = None,
    tier: Annotated[str | None, typer.Option(metavar="TIER", help="Priority tier: interactive, standard or batch.")] = None,
    weight: Annotated[int | None, typer.Option(metavar="N", help="Weight among tenants of the same tier, 1 to 1000.")] = None,
    limits: OwnerLimitOptions = NO_OWNER_LIMITS,
    terms: TermOptions = NO_TERMS,
    suspended: Annotated[
        bool | None, typer.Option("--suspend/--resume", help="Suspend: refuse its requests. Resume: serve them again.")
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Change a tenant. Options that are not given stay unchanged."""
    given = {"name": name, "tier": tier, "weight": weight, "suspended": suspended}
    body = {field: value for field, value in given.items() if value is not None} | limits.body() | terms.body()
    if not body:
        raise WrongUsage("nothing to change: give at least one option (see gatehouse tenants update --help)")

    settings = options.settings()
    _print(run(settings, call_on_tenant(which, "PATCH", body=body)), settings, as_json=options.as_json)


@app.command("archive")
def archive(which: TenantArgument, yes: Yes = False, options: CommonOptions = DEFAULTS) -> None:
    """Archive a tenant permanently. Asks for its name to confirm; usage and invoices are kept."""
    settings = options.settings()
    if not yes:
        require_terminal("archiving a tenant cannot be undone")
        tenant = run(settings, lambda client: find_tenant(client, which))
        if not tenant["archived"]:
            ask_for_name(tenant["name"], ARCHIVE_EFFECT)
        which = tenant["id"]
    _print(run(settings, call_on_tenant(which, "DELETE")), settings, as_json=options.as_json)


def _billing(given: list[str]) -> dict[str, str]:
    fields = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise WrongUsage(f"--billing must be FIELD=TEXT, not {text!r}")
        fields[name] = value.replace("\\n", "\n")
    return fields


def call_on_tenant(which: str, method: str, below: str = "", *, body: object = None) -> Work:
    """Return work that calls `/tenants/{id}{below}` for the tenant with this id or name."""

    async def work(client: AdminClient) -> dict[str, Any]:
        tenant = await find_tenant(client, which)
        return await client.call(method, f"/tenants/{tenant['id']}{below}", body=body)

    return work


async def tenant_field(client: AdminClient, which: str | None) -> dict[str, str]:
    """Return the field `tenant_id` if a tenant was given, else no field."""
    return {} if which is None else {"tenant_id": (await find_tenant(client, which))["id"]}


async def find_tenant(client: AdminClient, which: str) -> dict[str, Any]:
    """Return the tenant with this id or exact name."""
    if is_id(which, "tn") and (found := await client.find("/tenants", which)) is not None:
        return found
    rows: list[dict[str, Any]] = await client.list_all("/tenants", query={"include_archived": "true"})
    for tenant in rows:
        if which in (tenant["id"], tenant["name"]):
            return tenant
    hint = did_you_mean(which, [tenant["name"] for tenant in rows])
    raise CommandFailed(f"there is no tenant {which!r}{hint}", code="not_found")


def with_readable_budgets(owner: Mapping[str, Any], currency: str) -> dict[str, Any]:
    """Return a tenant or key with its budgets formatted as money, in its own currency or else in `currency`."""
    money = owner.get("currency") or currency
    readable = {**owner, "limits": _with_money(owner["limits"], money)}
    if owner.get("model_limits"):
        readable["model_limits"] = {model: _with_money(limits, money) for model, limits in owner["model_limits"].items()}
    return readable


def _with_money(limits: Mapping[str, Any], currency: str) -> dict[str, Any]:
    budget = limits.get("monthly_budget")
    return dict(limits) if budget is None else {**limits, "monthly_budget": format_exactly(budget * PICOS_PER_MICRO, currency)}


def _print(tenant: Mapping[str, Any], settings: Settings, *, as_json: bool) -> None:
    output.item(tenant if as_json else with_readable_budgets(tenant, settings.currency), as_json=as_json)
