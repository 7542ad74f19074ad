"""The parts of a running appliance that the HTTP interface and the console use. Only `app.py` builds them."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.settings import Settings
from appliance.metering.appliance_records import ApplianceRecords
from appliance.metering.economics_report import EconomicsReport
from appliance.metering.invoicing.free_allowances import FreeAllowances
from appliance.metering.invoicing.invoices import Invoices
from appliance.metering.ledger.corrections import Corrections
from appliance.metering.ledger.writer import Ledger
from appliance.metering.limits.admission import Admission
from appliance.metering.limits.saved_levels import LevelSaver
from appliance.metering.past_requests import PastRequests
from appliance.metering.prices import PriceBook
from appliance.metering.usage import UsageReports
from appliance.serving.alerting.alerts import Alerts
from appliance.serving.database_watch import DatabaseWatch
from appliance.serving.dry_runs import DryRuns
from appliance.serving.fair_semaphore import FairSemaphore
from appliance.serving.generations import Generations
from appliance.serving.housekeeping import Housekeeping
from appliance.serving.model_registry import ModelRegistry
from appliance.serving.readiness import Readiness
from appliance.telemetry.metrics import Metrics
from appliance.telemetry.sampler import SystemSampler
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.identities import Identities
from appliance.tenancy.keys import Keys
from appliance.tenancy.members import Members
from appliance.tenancy.memberships import Memberships
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.oidc import OidcProvider
from appliance.tenancy.second_factor import SecondFactors
from appliance.tenancy.sessions import Sessions
from appliance.tenancy.tenants import Tenants
from appliance.tenancy.tickets import Tickets
from appliance.tenancy.tiers import Tiers

LONG_BODIES_WAITING_MAX = 1024  # of all tenants


def _body_semaphore() -> FairSemaphore:
    return FairSemaphore(1, LONG_BODIES_WAITING_MAX, refusal="too many long requests are waiting to be read", retry_after_s=1.0)


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts of a running appliance. `control_token` gives the local command line the role of owner during this run.
    `body_semaphore` admits tenants in turn to the decoding of long request bodies, one per iteration of the event loop."""

    settings: Settings
    clock: Clock
    version: str
    epoch_id: str
    db: Database
    database_watch: DatabaseWatch
    # tenants and their keys
    tenants: Tenants
    keys: Keys
    tiers: Tiers
    model_policies: ModelPolicies
    # members, sign-in and roles
    members: Members
    memberships: Memberships
    sessions: Sessions
    second_factors: SecondFactors
    sign_in_tickets: Tickets
    oidc_tickets: Tickets
    identities: Identities
    oidc: OidcProvider | None
    admin_tokens: AdminTokens
    audit: AuditLog
    # limits, usage and billing
    admission: Admission
    limit_levels: LevelSaver
    dry_runs: DryRuns
    ledger: Ledger
    corrections: Corrections
    prices: PriceBook
    reports: UsageReports
    past_requests: PastRequests
    appliance_records: ApplianceRecords
    free_allowances: FreeAllowances
    invoices: Invoices
    economics: EconomicsReport
    # serving and telemetry
    housekeeping: Housekeeping
    alerts: Alerts
    models: ModelRegistry
    generations: Generations
    readiness: Readiness
    sampler: SystemSampler
    metrics: Metrics
    control_token: str = field(repr=False)
    body_semaphore: FairSemaphore = field(default_factory=_body_semaphore)

    def __deepcopy__(self, _memo: object) -> Services:
        """Return `self`: the framework deep-copies routers with everything they refer to, and services are shared."""
        return self
