"""Everything that the HTTP interface and the console are given. A value: `app.py` fills it, nobody else builds parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.settings import Settings
from appliance.metering.box_records import BoxRecords
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
from appliance.serving.forecasts import Forecasts
from appliance.serving.generations import Generations
from appliance.serving.housekeeping import Housekeeping
from appliance.serving.model_registry import ModelRegistry
from appliance.serving.readiness import Readiness
from appliance.serving.turns import Turns
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


def _body_turns() -> Turns:
    return Turns(1, LONG_BODIES_WAITING_MAX, refusal="too many long requests are waiting to be read", retry_after_s=1.0)


@dataclass(slots=True, kw_only=True)
class Services:
    """The parts of a running appliance. `control_token` is the owner's token of this run, for the local command line.
    `body_turns` lets tenants take turns with long bodies, of which one is read in a turn of the event loop."""

    settings: Settings
    clock: Clock
    version: str
    epoch_id: str
    db: Database
    database_watch: DatabaseWatch
    # whose requests are served
    tenants: Tenants
    keys: Keys
    tiers: Tiers
    model_policies: ModelPolicies
    # who signs in, and may do what
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
    # what may be used, was used and is owed
    admission: Admission
    limit_levels: LevelSaver
    forecasts: Forecasts
    ledger: Ledger
    corrections: Corrections
    prices: PriceBook
    reports: UsageReports
    past_requests: PastRequests
    box_records: BoxRecords
    free_allowances: FreeAllowances
    invoices: Invoices
    economics: EconomicsReport
    # what serves
    housekeeping: Housekeeping
    alerts: Alerts
    models: ModelRegistry
    generations: Generations
    readiness: Readiness
    sampler: SystemSampler
    metrics: Metrics
    control_token: str = field(repr=False)
    body_turns: Turns = field(default_factory=_body_turns)

    def __deepcopy__(self, _memo: object) -> Services:
        """Return the same services: the framework copies routers with everything in them, and these are shared."""
        return self
