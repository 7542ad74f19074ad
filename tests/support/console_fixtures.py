"""The console over a real database, with a fake engine side: the test sets live requests and samples."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
from litestar import Litestar

from appliance.api.error_responses import error_response
from appliance.api.exchange import ExchangeWrapper
from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import NotFound
from appliance.base.settings import Settings
from appliance.console.routes import create_console_router
from appliance.console.unknown_paths import answer_unknown_path
from appliance.metering.appliance_records import ApplianceRecords
from appliance.metering.calendar import BillingCalendar
from appliance.metering.economics_report import EconomicsReport
from appliance.metering.invoicing.free_allowances import FreeAllowances
from appliance.metering.past_requests import PastRequests
from appliance.metering.usage import UsageReports
from appliance.serving.alerting.alerts import Alerts
from appliance.serving.dry_runs import DryRuns
from appliance.serving.live_requests import LiveRequest
from appliance.serving.request_limits import RequestLimits
from appliance.serving.services import Services
from appliance.telemetry.gpu import NO_GPU, GpuReading
from appliance.telemetry.host import HostReading
from appliance.telemetry.readings import DatabaseReading, EngineReading, TenantReading
from appliance.telemetry.sampler import SystemSampler
from appliance.tenancy.access import Access
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.identities import Identities
from appliance.tenancy.keys import Keys
from appliance.tenancy.members import Members
from appliance.tenancy.memberships import Memberships
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.roles import Action
from appliance.tenancy.second_factor import SecondFactors
from appliance.tenancy.sessions import Sessions
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tickets import PROVIDER_SIGN_IN_LIFE_S, SIGN_IN_LIFE_S, Tickets
from appliance.tenancy.tiers import Tiers
from engine.protocol import EngineInfo, EngineStatus
from tests.support.cast import ALICE_PASSWORD, OWNER, PEPPER, Cast, Person, make_cast
from tests.support.engine_messages import GIB, engine_info, engine_status
from tests.support.ledgers import euro_invoices, euro_prices, utc_admission, utc_corrections, utc_ledger, utc_sums
from tests.support.reused_app import ReusedApp
from tests.support.row_templates import make_from_template

BASE_URL = "http://gatehouse.test"
VIEWER_PASSWORD = "vera's long password"
MEMBER_PASSWORD = "a long password of tests"
_CSRF = re.compile(r'name="csrf_token" value="([^"]+)"')


def tenant_reading(name: str, *, running: int = 1, waiting: int = 0, blocks: int = 0) -> TenantReading:
    """A tenant's use of the engine."""
    return TenantReading(
        tenant_id=f"tn_{name}",
        name=name,
        requests_running=running,
        requests_waiting=waiting,
        kv_blocks=blocks,
        service_s=0.0,
    )


@dataclass
class EngineSide:
    """The readings of engines and machine that the console shows; a test changes them and samples again."""

    clock: Clock
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    aborted: list[str] = field(default_factory=list)
    gpus: list[GpuReading] = field(default_factory=list)
    gpu_error: str | None = NO_GPU
    state: str = "ready"
    error: str | None = None
    problem: str | None = None
    info: EngineInfo | None = field(default_factory=engine_info)
    default_max_tokens: int | None = None
    status: EngineStatus | None = field(default_factory=engine_status)
    others: list[EngineReading] = field(default_factory=list)
    tokens_per_second: float = 0.0
    tenants: list[TenantReading] = field(default_factory=list)
    waiting_for_limits: int = 0
    database_ok: bool = True
    draining: bool = False

    def live(self, *, access: Access) -> dict[str, LiveRequest]:
        """Stand in for `Generations.live`."""
        return {request.id: request for request in self.requests.values() if access.sees(request.tenant_id)}

    def find(self, request_id: str, *, access: Access, action: Action = Action.READ) -> LiveRequest | None:
        """Stand in for `Generations.find`."""
        request = self.live(access=access).get(request_id)
        if request is not None:
            access.require(action, request.tenant_id)
        return request

    def abort(self, request_id: str, *, access: Access) -> None:
        """Stand in for `Generations.abort`: the request is removed at once."""
        if self.find(request_id, access=access, action=Action.ABORT) is None:
            raise NotFound(f"no live request {request_id}")
        del self.requests[request_id]
        self.aborted.append(request_id)

    def engines(self) -> list[EngineReading]:
        """Return the reading of the engine, and those of others."""
        reading = EngineReading(
            model="demo",
            state=self.state,
            error=self.error,
            problem=self.problem,
            load_fraction=None,
            info=self.info,
            default_max_tokens=self.default_max_tokens,
            status=self.status,
            pid=2,
            started_at=self.clock.now(),
            restarts=0,
            tokens_per_second=self.tokens_per_second,
            ttft_p50_s=0.213,
            ttft_p95_s=0.927,
            requests_waiting_for_limits=self.waiting_for_limits,
            tenants=self.tenants,
        )
        return [reading, *self.others]

    def sampler(self, interval_s: float) -> SystemSampler:
        """Return a real sampler over these readings."""
        started_at = self.clock.now()

        async def database() -> DatabaseReading:
            return DatabaseReading(kind="sqlite", ok=self.database_ok)

        host = HostReading(
            cpu_percent=37.0,
            cpu_count=2,
            memory_total_bytes=8 * GIB,
            memory_used_bytes=3 * GIB,
            disk_total_bytes=100 * GIB,
            disk_free_bytes=60 * GIB,
        )
        return SystemSampler(
            clock=self.clock,
            host=lambda: host,
            gpus=lambda: self.gpus,
            gpu_error=lambda: self.gpu_error,
            engines=self.engines,
            started_at=started_at,
            database=database,
            interval_s=interval_s,
        )

    def add(self, person: Person, request_id: str, *, state: str = "decode", **changes: Any) -> LiveRequest:
        """Add a live request of `person` and return it."""
        request = LiveRequest(
            id=request_id,
            tenant_id=person.tenant.id,
            tenant_name=person.tenant.name,
            key_id=person.key.id,
            key_prefix=person.key.prefix,
            model="demo",
            endpoint="/v1/chat/completions",
            stream=True,
            prompt_tokens=40,
            admitted_at=self.clock.now(),
            admitted_monotonic_s=self.clock.monotonic_s(),
            state=state,
            **changes,
        )
        self.requests[request_id] = request
        return request


@dataclass(kw_only=True)
class ConsoleApp:
    """A running console, its users, and the services behind it."""

    app: Litestar
    services: Services
    engine_side: EngineSide
    cast: Cast

    def visitor(self, base_url: str = BASE_URL) -> Browser:
        """Return a browser that is not signed in."""
        return Browser(self.app, base_url)

    async def alice(self) -> Browser:
        """Return the owner's browser, signed in."""
        return await self.visitor().sign_in("alice@example.com", ALICE_PASSWORD)

    async def vera(self) -> Browser:
        """Return the browser of a viewer, signed in."""
        return await self.visitor().sign_in("vera@example.com", VIEWER_PASSWORD)

    async def member_of(self, person: Person, role: str, *, email: str | None = None) -> Browser:
        """Create a member with `role` in the tenant of `person` and no role on the appliance; return its signed-in browser.

        Its e-mail address is by default `role@example.com`, its password MEMBER_PASSWORD."""
        member = await self.services.members.create(email or f"{role}@example.com", MEMBER_PASSWORD, "member")
        await self.services.memberships.add(person.tenant.id, member.id, role, access=OWNER)
        return await self.visitor().sign_in(member.email, MEMBER_PASSWORD)


class Browser:
    """An HTTP client with those behaviours of a browser that the console checks: cookies and the origin of a request."""

    def __init__(self, app: Litestar, base_url: str) -> None:
        transport = httpx.ASGITransport(app=cast("Any", app), client=("192.0.2.7", 1))
        self.http = httpx.AsyncClient(transport=transport, base_url=base_url)
        self.csrf_token = ""

    async def sign_in(self, email: str, password: str) -> Browser:
        """Sign in and store the CSRF token for forms."""
        answer = await self.post("/login", email=email, password=password)
        assert answer.status_code == 303, answer.text
        self.csrf_token = _CSRF.findall((await self.get("/tenants")).text)[0]
        return self

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """Return the answer to a plain GET."""
        return await self.http.get(path, headers=headers)

    async def fragment(self, path: str) -> httpx.Response:
        """Return the answer to htmx's GET."""
        return await self.http.get(path, headers={"HX-Request": "true"})

    async def post(self, path: str, /, **fields: str) -> httpx.Response:
        """Submit a same-origin form with the session's CSRF token; return the answer."""
        return await self.post_with({}, path, **fields)

    async def post_htmx(self, path: str, /, **fields: str) -> httpx.Response:
        """Submit a form as htmx does; return the answer."""
        return await self.post_with({"HX-Request": "true"}, path, **fields)

    async def post_with(self, headers: dict[str, str], path: str, /, **fields: str) -> httpx.Response:
        """Submit a form with additional headers; return the answer."""
        sent = {"Sec-Fetch-Site": "same-origin", **headers}
        return await self.http.post(path, data={"csrf_token": self.csrf_token, **fields}, headers=sent)


_IDLE: defaultdict[str, list[ReusedApp]] = defaultdict(list)
"""Idle applications, by the time zone of the days on their pages."""


def _create(services: Services) -> Litestar:
    app = Litestar(
        route_handlers=[create_console_router(services)],
        exception_handlers={Exception: answer_unknown_path(services, otherwise=error_response)},
        openapi_config=None,
    )
    app.asgi_handler = ExchangeWrapper(app.asgi_handler)
    return app


@asynccontextmanager
async def open_console(
    template: Path, folder: Path, clock: Clock, *, interval_s: float = 3600.0, time_zone: str = "UTC"
) -> AsyncIterator[ConsoleApp]:
    """Open a console over a copy of the migrated database `template` in `folder`; one sample is taken at the start."""
    path = folder / "gatehouse.db"
    shutil.copyfile(template, path)
    database = Database.open(f"sqlite:///{path}")
    people = await make_from_template(database, clock, _make_people)
    engine_side = EngineSide(clock)
    services = _services(database, clock, engine_side, people, folder, interval_s, BillingCalendar(time_zone))
    await services.ledger.start()
    await services.sampler.start()
    idle = _IDLE[time_zone]
    reused = idle.pop() if idle else ReusedApp(services, _create)
    reused.serve(services)
    try:
        yield ConsoleApp(app=reused.app, services=services, engine_side=engine_side, cast=people)
        idle.append(reused)
    finally:
        await services.sampler.stop()
        await services.ledger.stop()
        await database.close()


async def _make_people(database: Database, clock: Clock) -> Cast:
    people = await make_cast(database, clock)
    await Members(database, clock).create("vera@example.com", VIEWER_PASSWORD, "viewer")
    return people


def _services(
    database: Database,
    clock: Clock,
    engine_side: EngineSide,
    people: Cast,
    folder: Path,
    interval_s: float,
    calendar: BillingCalendar,
) -> Services:
    models = SimpleNamespace(list=lambda: [SimpleNamespace(name="demo", max_model_len=2048, default_max_tokens=None)])
    admission = utc_admission(clock, utc_sums(database, calendar=calendar), calendar=calendar)
    prices = euro_prices(database, clock)
    tiers, policies = Tiers(database, clock), ModelPolicies(database, clock)
    settings = Settings(data_dir=folder, database_url=f"sqlite:///{folder / 'gatehouse.db'}")
    records, reports = ApplianceRecords(database, clock), UsageReports(database, calendar=calendar)
    parts: dict[str, Any] = {
        "settings": settings,
        "clock": clock,
        "version": "test",
        "epoch_id": people.epoch_id,
        "control_token": "the command line's",
        "db": database,
        "tenants": Tenants(database, clock),
        "keys": Keys(database, clock, PEPPER),
        "members": Members(database, clock),
        "memberships": Memberships(database, clock),
        "sessions": Sessions(database, clock),
        "second_factors": SecondFactors(database, clock, PEPPER),
        "sign_in_tickets": Tickets(PEPPER, "sign-in", clock, life_s=SIGN_IN_LIFE_S),
        "oidc_tickets": Tickets(PEPPER, "provider sign-in", clock, life_s=PROVIDER_SIGN_IN_LIFE_S),
        "identities": Identities(database, clock),
        "admin_tokens": AdminTokens(database, clock),
        "audit": AuditLog(database, clock),
        "tiers": tiers,
        "model_policies": policies,
        "admission": admission,
        "dry_runs": DryRuns(
            admission,
            prices=prices,
            tiers=tiers,
            policies=policies,
            models=cast("Any", models),
            clock=clock,
            limits=RequestLimits.of(settings),
        ),
        "ledger": utc_ledger(database, clock, people.epoch_id, calendar=calendar),
        "prices": prices,
        "invoices": euro_invoices(database, clock, calendar),
        "reports": reports,
        "past_requests": PastRequests(database),
        "corrections": utc_corrections(database, clock, calendar=calendar),
        "appliance_records": records,
        "free_allowances": FreeAllowances(database, clock),
        "economics": EconomicsReport(records, reports, clock),
        "alerts": Alerts(settings, database, clock, calendar, PEPPER),
        "models": cast("Any", models),
        "generations": cast("Any", engine_side),
        "sampler": engine_side.sampler(interval_s),
    }
    # Services that the console does not use are None, so that new ones need no change here.
    unused: dict[str, Any] = {field.name: None for field in dataclasses.fields(Services) if field.name not in parts}
    return Services(**parts, **unused)
