"""The composition root: the only place that knows every part. Builds the services, mounts the routes, starts and stops."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from alembic.util.exc import CommandError
from litestar import Litestar
from litestar.datastructures import State
from sqlalchemy.exc import SQLAlchemyError

from appliance.api.error_responses import error_response
from appliance.api.exchange import CheckedRequest, ExchangeWrapper
from appliance.api.http_server import CannotStart, HttpServer, control_file, data_dir_lock, listening_socket
from appliance.api.implied_methods import CompleteOptions, HeadLikeGet
from appliance.api.openapi import openapi_config
from appliance.api.routers import api_routers
from appliance.base.clock import SystemClock
from appliance.base.data_folder import StartupFiles, make_data_folder
from appliance.base.database_claim import DatabaseClaim, claim_database
from appliance.base.db import Database, reason_of
from appliance.base.errors import GatehouseError
from appliance.base.journal import Journal
from appliance.base.migrations import upgrade
from appliance.base.settings import Settings, UnusableData
from appliance.base.version import current_version
from appliance.console.routes import create_console_router
from appliance.console.unknown_paths import answer_unknown_path
from appliance.metering import sealed_secrets
from appliance.metering.alerts.outbox_pruning import OutboxPruner
from appliance.metering.appliance_records import ApplianceRecords
from appliance.metering.calendar import BillingCalendar
from appliance.metering.economics_report import EconomicsReport
from appliance.metering.invoicing.free_allowances import FreeAllowances
from appliance.metering.invoicing.invoices import Invoices
from appliance.metering.ledger import rollups
from appliance.metering.ledger.corrections import Corrections
from appliance.metering.ledger.epochs import EpochEnded, begin_epoch, end_epoch
from appliance.metering.ledger.journal_records import SUFFIX, open_journal, replay
from appliance.metering.ledger.recovery import recover
from appliance.metering.ledger.round import OnSettled
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.ledger_sums import LedgerSums
from appliance.metering.limits.saved_levels import LevelSaver
from appliance.metering.past_request_pruning import PastRequestPruner
from appliance.metering.past_requests import PastRequests
from appliance.metering.prices import PriceBook
from appliance.metering.usage import UsageReports
from appliance.serving.alerting.alerts import Alerts
from appliance.serving.claim_watch import stop_when_claim_lost
from appliance.serving.database_watch import DatabaseWatch
from appliance.serving.dry_runs import DryRuns
from appliance.serving.engine_readings import engine_reading
from appliance.serving.generations import Generations
from appliance.serving.housekeeping import Housekeeping
from appliance.serving.model_builder import build_models, model_folders
from appliance.serving.model_registry import ModelRegistry
from appliance.serving.readiness import Readiness
from appliance.serving.request_limits import RequestLimits
from appliance.serving.services import Services
from appliance.telemetry.gpu import GpuProbe
from appliance.telemetry.host import HostProbe
from appliance.telemetry.metrics import Metrics
from appliance.telemetry.sampler import SystemSampler
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.bootstrap import FirstStart, bootstrap
from appliance.tenancy.first_login import mark_shown
from appliance.tenancy.identities import Identities
from appliance.tenancy.keys import Keys
from appliance.tenancy.members import Members
from appliance.tenancy.memberships import Memberships
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.oidc import provider_from_settings
from appliance.tenancy.second_factor import SecondFactors, appliance_label
from appliance.tenancy.secrets import read_or_create_pepper
from appliance.tenancy.sessions import Sessions
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tickets import PROVIDER_SIGN_IN_LIFE_S, SIGN_IN_LIFE_S, Tickets
from appliance.tenancy.tiers import Tiers

SETTLE_TIMEOUT_S = 10.0

log = structlog.get_logger()


class Appliance:
    """All parts of one appliance. With `engines=False` it serves no model; the command line uses this when none is running."""

    def __init__(self, settings: Settings, *, engines: bool = True) -> None:
        self.settings = settings
        self.engines = engines
        self.first_start: FirstStart | None = None
        self._clock = SystemClock()
        self._calendar = BillingCalendar(settings.time_zone)
        self._services: Services | None = None
        self._gpu = GpuProbe()
        self.claim: DatabaseClaim | None = None
        self._journal: Journal | None = None

    @property
    def services(self) -> Services:
        """Return the parts. Raises RuntimeError before `start` has built them."""
        if self._services is None:
            raise RuntimeError("the appliance has not been started")
        return self._services

    async def start(self) -> None:
        """Claim the database, migrate, recover records of a crashed run, and start every part. Engines load in the background.

        Raises NotAModel, UnusableData, ValueError, EpochEnded or an error of the database; nothing is left running then.
        """
        settings = self.settings
        make_data_folder(settings.data_dir)
        if self.engines:
            self.claim = await claim_database(settings.database_url)
        db = Database.open(settings.database_url)
        try:
            await asyncio.to_thread(upgrade, settings.database_url)
            self._services = await self._build(db)
            await self._start_parts(self._services)
        except BaseException:
            await self._release(db)
            raise

    async def stop(self) -> None:
        """Settle live requests and stop every part before those that it depends on."""
        services = self.services
        await services.housekeeping.stop()
        await services.readiness.stop()
        await services.generations.stop(SETTLE_TIMEOUT_S)
        await services.alerts.stop()
        await asyncio.gather(*(model.engine.stop() for model in services.models.list()))
        try:
            if self.engines:
                await services.keys.flush_last_used()
                await services.admission.stop()
                await services.ledger.stop()
                await services.limit_levels.stop()
                await end_epoch(services.db, services.clock, services.epoch_id)
        finally:
            await self._release(services.db)

    async def _release(self, db: Database) -> None:
        """Stop the sampler, close GPU probe, journal and database, and release the claim. Also cleans up a failed start."""
        try:
            if self._services is not None:
                await self._services.sampler.stop()
            self._gpu.close()
            if self._journal is not None:
                await self._journal.close()
            await db.close()
        finally:
            if self.claim is not None:
                await self.claim.release()

    async def _build(self, db: Database) -> Services:
        settings, clock, calendar, metrics = self.settings, self._clock, self._calendar, Metrics()
        started_at = clock.now()
        pepper = read_or_create_pepper(settings.data_dir)
        alerts = Alerts(settings, db, clock, calendar, pepper)
        on_settled = alerts.budgets.on_settled
        epoch_id = await self._begin_epoch(db, on_settled)
        sums = LedgerSums(db, calendar=calendar, request_deadline_s=settings.request_deadline_s)
        admission = Admission(clock, sums, currency=settings.currency, calendar=calendar, waits=metrics)
        keys, tiers, policies = Keys(db, clock, pepper), Tiers(db, clock), ModelPolicies(db, clock)
        await sealed_secrets.log_unreadable(db, pepper)
        ledger = Ledger(
            db, clock, epoch_id, currency=settings.currency, calendar=calendar, on_settled=on_settled, journal=self._journal
        )
        limits, prices = RequestLimits.of(settings), PriceBook(db, clock, currency=settings.currency)
        reports, appliance_records = UsageReports(db, calendar=calendar), ApplianceRecords(db, clock)
        generations = Generations(
            db, clock, metrics, limits, admission=admission, tiers=tiers, policies=policies, ledger=ledger, prices=prices
        )
        models, database_watch = ModelRegistry(), DatabaseWatch(db, clock)
        if self.engines:
            models = build_models(settings, clock=clock, metrics=metrics, on_frame=generations.note_frame)
        readiness = Readiness(models, clock, interval_s=settings.probe_interval_s)
        return Services(
            settings=settings,
            clock=clock,
            version=current_version(),
            epoch_id=epoch_id,
            db=db,
            database_watch=database_watch,
            tenants=Tenants(db, clock),
            keys=keys,
            tiers=tiers,
            model_policies=policies,
            members=Members(db, clock),
            memberships=Memberships(db, clock),
            sessions=Sessions(db, clock, idle_s=settings.session_idle_s, absolute_s=settings.session_absolute_s),
            second_factors=SecondFactors(db, clock, pepper, label=appliance_label(settings.external_url)),
            sign_in_tickets=Tickets(pepper, "sign-in", clock, life_s=SIGN_IN_LIFE_S),
            oidc_tickets=Tickets(pepper, "provider sign-in", clock, life_s=PROVIDER_SIGN_IN_LIFE_S),
            identities=Identities(db, clock),
            oidc=provider_from_settings(settings, clock),
            admin_tokens=AdminTokens(db, clock),
            audit=AuditLog(db, clock),
            admission=admission,
            limit_levels=LevelSaver(db, admission),
            dry_runs=DryRuns(
                admission, prices=prices, tiers=tiers, policies=policies, models=models, clock=clock, limits=limits
            ),
            ledger=ledger,
            corrections=Corrections(db, clock, calendar=calendar, on_settled=on_settled, on_committed=admission.correct),
            prices=prices,
            reports=reports,
            past_requests=PastRequests(db),
            appliance_records=appliance_records,
            free_allowances=FreeAllowances(db, clock),
            invoices=Invoices(db, clock, calendar, currency=settings.currency),
            economics=EconomicsReport(appliance_records, reports, clock),
            housekeeping=Housekeeping(
                keys,
                PastRequestPruner(db, clock, keep_days=settings.request_history_days),
                OutboxPruner(db, clock, keep_days=settings.request_history_days),
            ),
            alerts=alerts,
            models=models,
            generations=generations,
            readiness=readiness,
            sampler=SystemSampler(
                clock=clock,
                host=HostProbe(settings.data_dir).read,
                gpus=self._gpu.read,
                gpu_error=lambda: self._gpu.error,
                engines=lambda: [
                    engine_reading(
                        model,
                        clock,
                        readiness,
                        tenant_names=generations.tenant_names,
                        waiting_for_limits=generations.num_waiting_for_limits(model.name),
                    )
                    for model in models.list()
                ],
                started_at=started_at,
                database=database_watch.reading,
            ),
            metrics=metrics,
            control_token=secrets.token_urlsafe(32),
        )

    async def _begin_epoch(self, db: Database, on_settled: OnSettled) -> str:
        """Begin an epoch and recover the records of crashed ones. Without engines there is no epoch: return "none"."""
        if not self.engines:
            return "none"
        await self._open_journal(db, on_settled)
        epoch_id = await begin_epoch(db, self._clock, current_version())
        recovered = await recover(db, self._clock, epoch_id, calendar=self._calendar, on_settled=on_settled)
        if recovered:
            log.warning("records of an earlier run recovered", count=recovered)
        if await rollups.align_days(db, self._calendar):
            log.warning("daily sums rebuilt for another time zone", time_zone=self._calendar.time_zone)
        return epoch_id

    async def _open_journal(self, db: Database, on_settled: OnSettled) -> None:
        """Open the journal, if the database has one, and write the records that a crashed run left in it to the tables."""
        try:
            self._journal = open_journal(self.settings.database_url)
            missing = 0 if self._journal is None else await replay(db, self._journal, self._clock, self._calendar, on_settled)
        except OSError as error:
            where = f"{self.settings.database_url.removeprefix('sqlite:///')}{SUFFIX}"
            raise UnusableData(f"the journal {where} cannot be used: {error.strerror or error}") from error
        if missing:
            log.warning("records of an earlier run written from the journal to the tables", count=missing)

    async def _start_parts(self, services: Services) -> None:
        await services.sampler.start()
        services.metrics.attach(lambda: services.sampler.latest)
        engines = [model.engine for model in services.models.list()]
        services.metrics.compare_usage(
            lambda: (
                services.ledger.unrecorded_usage_tokens
                + sum(engine.stats.reconciliation.unexplained_tokens for engine in engines)
            )
        )
        if not self.engines:
            return
        self.first_start = await bootstrap(
            self.settings, services.members, services.admin_tokens, services.tenants, services.keys
        )
        await services.ledger.start()
        services.metrics.watch_ledger(lambda: services.ledger.healthy)
        for model in services.models.list():
            model.engine.start()
        services.readiness.start()
        services.alerts.start(services.models, services.readiness, services.metrics, version=services.version)
        services.generations.start_watching()
        services.limit_levels.start()
        services.admission.start()
        services.housekeeping.start()


def create_app(appliance: Appliance) -> Litestar:
    """Return the ASGI application of a started appliance: API, health, metrics, schema and console."""
    services = appliance.services
    app = Litestar(
        route_handlers=[*api_routers(), create_console_router(services)],
        state=State({"services": services}),
        exception_handlers={GatehouseError: error_response, Exception: answer_unknown_path(services, otherwise=error_response)},
        openapi_config=openapi_config(services.version),
        request_max_body_size=services.settings.max_body_bytes,
        logging_config=None,
        request_class=CheckedRequest,
    )
    app.asgi_handler = ExchangeWrapper(CompleteOptions(HeadLikeGet(app.asgi_handler), app.routes))
    return app


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the command line prints once the service listens. `first_start` holds secrets that are shown only once."""

    host: str
    port: int
    models: list[str]
    first_start: FirstStart | None
    services: Services


async def serve(settings: Settings, *, on_listening: Callable[[Started], None] = lambda _started: None) -> None:
    """Serve until a signal stops the server. Raises CannotStart or NotAModel if serving cannot start or continue.

    `on_listening` shows the first login. Once it has returned, the login counts as shown and is not created again.
    """
    model_folders(settings)
    startup_files = StartupFiles.begin(settings.data_dir)
    with data_dir_lock(settings.data_dir), startup_files.removed_on_failure(), listening_socket(settings) as listener:
        appliance = Appliance(settings)
        await _start(appliance)
        startup_files.keep = True
        try:
            await _serve_on(listener, appliance, on_listening)
        finally:
            await appliance.stop()


async def _start(appliance: Appliance) -> None:
    try:
        await appliance.start()
    except (SQLAlchemyError, CommandError) as error:
        reason = f"the database cannot be used: {reason_of(error)}; check --database and `gatehouse doctor`"
        raise CannotStart(reason) from error
    except (UnusableData, ValueError, EpochEnded) as error:
        raise CannotStart(str(error)) from error


async def _serve_on(listener: socket.socket, appliance: Appliance, on_listening: Callable[[Started], None]) -> None:
    settings, services = appliance.settings, appliance.services
    assert appliance.claim is not None
    host, port = listener.getsockname()[:2]
    server = HttpServer(create_app(appliance), listener, settings.trusted_proxies)
    models = [model.name for model in services.models.list()]
    with control_file(settings.data_dir, host, port, services.control_token):
        log.info("listening", host=host, port=port, models=models)
        on_listening(Started(host=host, port=port, models=models, first_start=appliance.first_start, services=services))
        if appliance.first_start is not None:
            mark_shown(settings.data_dir)
        watches = [
            asyncio.create_task(_stop_without_models(services.models, server), name="first models"),
            asyncio.create_task(stop_when_claim_lost(appliance.claim, services, server.stop), name="database claim"),
        ]
        try:
            await server.run(services.generations, drain_timeout_s=settings.drain_timeout_s)
        finally:
            ended = [watch for watch in watches if not watch.cancel()]
        for watch in ended:
            if (reason := watch.result()) is not None:
                raise CannotStart(reason)


async def _stop_without_models(models: ModelRegistry, server: HttpServer) -> str | None:
    """Return None as soon as a model is ready. If all fail to load, stop the server and return why."""
    for model in models.list():
        await model.engine.wait_for_state("ready", "failed", "stopped")
        if model.engine.state != "failed":
            return None
    if any(model.engine.state != "failed" for model in models.list()):  # it was tried again while others were loading
        return None
    server.stop()
    return "; ".join(f"the model {model.name} could not be loaded: {model.engine.error}" for model in models.list())
