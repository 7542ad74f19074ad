"""The audit log in the console: who changed what, filtered by actor, action and day. Read only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from litestar import get

from appliance.console.audit_descriptions import ACTIONS, CHANGES_EXPANDED_MAX, audit_line
from appliance.console.context import ContextDependency
from appliance.console.rendering import Html
from appliance.console.tenant_names import tenants_by_name
from appliance.console.urls import build_url
from appliance.metering.calendar import BillingCalendar
from appliance.tenancy.audit import AuditFilter
from appliance.tenancy.roles import Action

PAGE_ROWS = 50
TEXT_CHARS_MAX = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Filters from the query string; an empty text means no filter. Days are in the billing time zone."""

    actor: str
    action: str
    target: str
    tenant: str
    start: str
    end: str
    cursor: str

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filters:
        """Parse the query string; invalid days are ignored."""
        texts = {
            name: query.get(name, "").strip()[:TEXT_CHARS_MAX] for name in ("actor", "action", "target", "tenant", "cursor")
        }
        return cls(**texts, **{name: query.get(name, "") if _day(query.get(name, "")) else "" for name in ("start", "end")})

    @property
    def has_parameters(self) -> bool:
        """Return whether any filter or a cursor is set."""
        return any(getattr(self, name) for name in self.__slots__)

    def page(self, cursor: str = "") -> str:
        """Return the URL of the entries after `cursor`, or of the newest ones, with the same filters."""
        return build_url("/audit", **{name: getattr(self, name) for name in self.__slots__} | {"cursor": cursor})

    def narrowed(self, calendar: BillingCalendar) -> AuditFilter:
        """Return the filter for the query."""
        start, end = _day(self.start), _day(self.end)
        return AuditFilter(
            actors=[self.actor] if self.actor else None,
            actions=[self.action] if self.action else None,
            targets=[self.target] if self.target else None,
            tenant_ids=[self.tenant] if self.tenant else None,
            start=None if start is None else calendar.day_start(start),
            end=None if end is None else calendar.next_day_start(end),
        )


@get("/audit")
async def show_audit(context: ContextDependency) -> Html:
    """The visible entries, newest first; when a filter changes, htmx requests only the rows."""
    services, access = context.services, context.access
    access.require_somewhere(Action.AUDIT)
    filters = Filters.of(context.query)
    page = await services.audit.page(
        PAGE_ROWS, filters.cursor or None, filters.narrowed(services.reports.calendar), access=access
    )
    tenants = await tenants_by_name(services, access)
    names = {tenant.id: tenant.name for tenant in tenants}
    targets = await services.audit.target_names(page.data)
    webhooks = await services.alerts.webhooks.names({one.target_id for one in page.data if one.target_kind == "webhook"})
    return context.page(
        "pages/audit.html",
        part="fragments/audit_rows.html",
        filters=filters,
        actions=ACTIONS,
        changes_expanded_max=CHANGES_EXPANDED_MAX,
        rows=[audit_line(entry, names | targets | webhooks) for entry in page.data],
        tenants=tenants,
        tenant_names=names,
        sees_all=access.sees_all,
        next_page=filters.page(page.next_cursor) if page.next_cursor else None,
    )


def _day(text: str) -> date | None:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        return None
    return day if 1971 <= day.year <= 9000 else None
