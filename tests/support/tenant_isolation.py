"""For tests of tenant isolation: tenants with rows in all tables, people of every role, and every route with its parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from litestar import Litestar
from litestar.routes import HTTPRoute
from sqlalchemy import Table, insert

from appliance.base.ids import new_id
from appliance.base.tables import free_allowances, invoice_lines, invoices, outbox, webhooks
from appliance.metering.ledger.epochs import begin_epoch
from appliance.serving.services import Services
from appliance.tenancy.browser_rules import CSRF_HEADER, PLAIN_COOKIE
from appliance.tenancy.members import Member
from appliance.tenancy.principals import KeyChanges, Limits, TenantChanges
from tests.support.cast import OWNER, Person
from tests.support.factories import pending, posted
from tests.support.ledgers import running_ledger

NO_SUCH_ID = "nothing"
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path, with the names of its query and body parameters."""

    method: str
    path: str
    query: tuple[str, ...]
    body: tuple[str, ...]

    @property
    def parameters(self) -> list[str]:
        """Return the names of path parameters."""
        return re.findall(r"{(\w+):\w+}", self.path)

    @property
    def template(self) -> str:
        """Return the path with its parameters' names but not their types."""
        return re.sub(r"{(\w+):\w+}", r"{\1}", self.path)

    def filled(self, values: Mapping[str, str]) -> str:
        """Return the path with `values` filled in; a missing one becomes an id that does not exist."""
        return re.sub(r"/?{(\w+):(\w+)}", lambda found: "/" + values.get(found[1], NO_SUCH_ID), self.path)


def routes_of(app: Litestar) -> list[Route]:
    """Return every route of the application, sorted."""
    return sorted(_routes(app), key=lambda route: (route.path, route.method))


def _routes(app: Litestar) -> Iterator[Route]:
    for route in app.routes:
        assert isinstance(route, HTTPRoute), f"{route.path} is no HTTP route: say here who may use it"
        for handler in route.route_handlers:
            for method in handler.http_methods:
                if method != "OPTIONS":
                    body = handler.opt.get("body")
                    fields = () if body is None else body.__struct_fields__
                    yield Route(str(method), route.path, tuple(handler.opt.get("query", ())), fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class PopulatedTenant:
    """A tenant with every kind of row that the database can hold of it. Nobody else may read its `marks`."""

    person: Person
    people: Mapping[str, Member]
    request_id: str
    others: dict[str, str] = field(default_factory=dict)

    @property
    def ids(self) -> dict[str, str]:
        """Return the values of path and query parameters for this tenant."""
        tenant_id, key_id = self.person.tenant.id, self.person.key.id
        member = self.people["viewer"]
        return {
            "tenant_id": tenant_id,
            "tenant": tenant_id,
            "project_id": tenant_id,
            "project_ids": tenant_id,
            "key_id": key_id,
            "key": key_id,
            "api_key_ids": key_id,
            "resource_ids": key_id,
            "target_id": key_id,
            "request_id": self.request_id,
            "member_id": member.id,
            "user_ids": member.id,
            "actor_ids": member.id,
            "actor_id": member.id,
            **self.others,
        }

    @property
    def marks(self) -> set[str]:
        """Return the names and ids that only this tenant's people may read."""
        name = self.person.tenant.name
        ids = {value for value in self.ids.values() if not value.isdigit()}  # numbers occur everywhere
        return {name, f"{name}.example", self.person.key.prefix, *ids}

    @property
    def missing(self) -> dict[str, str]:
        """Return ids in the form of `ids` that do not exist."""
        return {name: str(10**9) if value.isdigit() else value[:4] + "x" * (len(value) - 4) for name, value in self.ids.items()}


async def make_populated_tenant(services: Services, name: str) -> PopulatedTenant:
    """Create a tenant `name` with a key, a billed request, and a member of each role."""
    tenant = await services.tenants.create(
        name, TenantChanges(limits=Limits(tokens_per_minute=1000), billing={"name": name}), access=OWNER
    )
    terms = KeyChanges(scopes=["inference", "usage"])
    key, secret = await services.keys.create(tenant.id, f"{name}'s key", terms, access=OWNER)
    person = Person(tenant=tenant, key=key, secret=secret)
    epoch_id = await begin_epoch(services.db, services.clock, "test")
    async with running_ledger(services.db, services.clock, epoch_id) as ledger:
        entry = pending(person, admitted_at=services.clock.now())
        await ledger.open(entry)
        await ledger.settle(posted(entry.request_id))
    people = {}
    for role in ("manager", "developer", "viewer"):
        email = f"{role}@{name}.example"
        member = await services.members.create(email, "a password of tests", "member")
        await services.memberships.add(tenant.id, member.id, role, access=OWNER)
        people[role] = member
    _, session = await services.sessions.open(people["viewer"].id, f"{name}'s browser", "192.0.2.8")
    event = await services.reports.event(entry.request_id, access=OWNER)
    others = {"session_id": session.id, "event_id": str(event.id), **await _make_billing_rows(services, tenant.id, name)}
    return PopulatedTenant(person=person, people=people, request_id=entry.request_id, others=others)


async def _make_billing_rows(services: Services, tenant_id: str, name: str) -> dict[str, str]:
    """Insert a closed invoice with a line, an allowance, a webhook and a delivery to it; return their ids."""
    now = services.clock.now()
    ids = {f"{what}_id": new_id(what[:3]) for what in ("invoice", "allowance", "webhook", "delivery")}
    of_tenant: Values = {"tenant_id": tenant_id, "created_at": now}
    invoice = of_tenant | {
        "id": ids["invoice_id"],
        "month": "2026-01",
        "number": f"{name}-1",
        "state": "closed",
        "closed_at": now,
    }
    invoice |= {"currency": "EUR", "total_micros": 1, "tax_micros": 0, "through_posting": 1}
    line: Values = {"invoice_id": ids["invoice_id"], "position": 1, "model": f"{name}'s model", "kind": "prompt"}
    line |= {"month": "2026-01", "unit_price": 1, "tokens": 1, "requests": 1, "exact_picos": "1000000", "rounded_micros": 1}
    allowance = of_tenant | {"id": ids["allowance_id"], "first_month": "2026-01", "monthly_micros": 1}
    webhook = of_tenant | {"id": ids["webhook_id"], "kind": "webhook", "target": f"https://{name}.example/hook"}
    webhook |= {"secret": None, "events": ["invoice.closed"]}
    payload = {"tenant_id": tenant_id, "tenant_name": name, "number": f"{name}-1", "month": "2026-01"}
    delivery: Values = {"id": ids["delivery_id"], "webhook_id": ids["webhook_id"], "dedupe_key": f"{name} once"}
    delivery |= {"event": "invoice.closed", "payload": {"data": payload}, "attempts": 1, "delivered_at": now, "created_at": now}
    rows: tuple[tuple[Table, Values], ...]
    rows = ((invoices, invoice), (invoice_lines, line), (free_allowances, allowance), (webhooks, webhook), (outbox, delivery))
    async with services.db.writing() as connection:
        for table, row in rows:
            await connection.execute(insert(table).values(**row))
    return ids


async def session_headers(services: Services, member: Member) -> dict[str, str]:
    """Return the headers of a browser session of `member`, valid for the API and the console."""
    token, session = await services.sessions.open(member.id, "a browser", "192.0.2.7")
    cookie = f"{PLAIN_COOKIE}={token}"
    return {"authorization": "", "cookie": cookie, CSRF_HEADER: session.csrf_token, "sec-fetch-site": "same-origin"}
