"""The request history: filters from the query string, and pages of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.console.request_lines import RequestLine, past_line
from appliance.console.urls import build_url
from appliance.metering.past_requests import SEARCHED_MAX, RequestFilter

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.tenancy.access import Access

PAGE_ROWS = 50
TEXT_CHARS_MAX = 100
FINISH_REASONS = ("stop", "length", "aborted", "disconnected", "deadline", "error", "refused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Filters from the query string; an empty text means no filter. `state` is a finish reason."""

    q: str
    tenant: str
    state: str
    cursor: str

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filters:
        """Parse the query string; an unknown finish reason is ignored."""
        state = query.get("state", "")
        return cls(
            q=query.get("q", "").strip()[:TEXT_CHARS_MAX],
            tenant=query.get("tenant", ""),
            state=state if state in FINISH_REASONS else "",
            cursor=query.get("cursor", ""),
        )

    @property
    def requests(self) -> RequestFilter:
        """Return the filter for the query."""
        return RequestFilter(tenant_id=self.tenant or None, finish_reason=self.state or None, text=self.q or None)

    @property
    def has_parameters(self) -> bool:
        """Return whether any filter or a cursor is set."""
        return bool(self.q or self.tenant or self.state or self.cursor)

    def page(self, cursor: str = "") -> str:
        """Return the URL of the rows after `cursor`, or of the newest ones, with the same filters."""
        return build_url("/requests", q=self.q, tenant=self.tenant, state=self.state, cursor=cursor)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPage:
    """The matching rows and the URL of the next page. `searched` is the number of requests searched, if the search stopped at
    its limit before the page was full."""

    rows: list[RequestLine]
    next_page: str | None
    searched: int | None


async def history_page(services: Services, filters: Filters, names: dict[str, str], access: Access) -> HistoryPage:
    """Return a page of the history."""
    page = await services.past_requests.page(PAGE_ROWS, filters.cursor or None, filters.requests, access=access)
    live = services.generations.live(access=access)
    rows = [past_line(row, names) for row in page.data if row.id not in live]
    return HistoryPage(
        rows=rows,
        next_page=filters.page(page.next_cursor) if page.next_cursor else None,
        searched=SEARCHED_MAX if page.has_more and len(page.data) < PAGE_ROWS else None,
    )
