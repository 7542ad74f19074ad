"""Renders templates as pages or fragments, redirects, and shows messages about completed changes."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Response
from litestar.datastructures import Cookie
from markupsafe import Markup

from appliance.console.charts import spark_area, spark_points, stack, timeline
from appliance.console.formatting import template_filters
from appliance.console.forms import names_text, sentence
from appliance.console.sections import sections_of
from appliance.console.security import ConsoleRequest, current_page_url, current_session, may

if TYPE_CHECKING:
    from appliance.serving.services import Services

Html = Response[str]

WEB_DIR = Path(__file__).resolve().parents[2] / "web"
STATIC_DIR = WEB_DIR / "static"
THEME_COOKIE, DONE_COOKIE = "gatehouse_theme", "gatehouse_done"
THEMES = ("auto", "light", "dark")
DONE_SHOWN_FOR_S = 30
HTML = "text/html"
_IN_DIALOG = Markup('href="{0}" hx-get="{0}" hx-target="#dialog"')
# One file per component, in the order of the cascade layers that the first file declares.
STYLES = (
    *("layers", "base", "shell", "buttons", "forms", "badges", "tiles"),
    *("cards", "charts", "tables", "audit", "dialog", "toasts", "login", "account", "print"),
)
SCRIPTS = ("live", "heights", "rows", "dialog", "scope", "toasts", "keyboard", "copy")
# Messages about a completed change, shown on the page that follows it. The cookie carries the name, never the text.
DONE = {
    "tenant-created": "Tenant created. Create an API key next.",
    "tenant-saved": "Tenant saved. New limits apply at once.",
    "tenant-suspended": "Tenant suspended. All its requests are refused; running ones are aborted.",
    "tenant-resumed": "Tenant resumed.",
    "tenant-archived": "Tenant archived. Its ledger is kept.",
    "key-saved": "Key saved. New limits apply at once.",
    "key-revoked": "Key revoked. Requests with it are refused.",
    "member-saved": "Member saved. The role applies from the next request on.",
    "factor-reset": "Second factor reset. All devices of the member are signed out.",
    "tenant-member-added": "Added. The role applies from the next request on.",
    "tenant-member-saved": "Role saved. It applies from the next request on.",
    "tenant-member-removed": "Removed from the tenant.",
    "alert-added": "Alert target added. Send a test to check delivery.",
    "alert-saved": "Saved.",
    "alert-paused": "Paused. No new alerts are sent to this target.",
    "alert-resumed": "Resumed. Pending alerts are delivered first.",
    "alert-removed": "Removed. No more alerts are sent to this target.",
    "test-sent": "Test queued. Its delivery is listed below.",
    "delivery-retried": "Retry queued under the same id.",
    "settings-saved": "Saved. It applies from the next request on.",
    "costs-saved": "Saved. Figures were recalculated.",
    "seller-saved": "Saved. Invoices closed from now on show it.",
    "invoice-closed": "Invoice closed. It has its number and cannot be changed.",
    "month-drafted": "Drafted for all tenants with something to bill in that month.",
    "month-not-drafted": "Nothing was drafted: no tenant has anything left to bill in that month.",
    "month-closed": "Invoices closed. They have their numbers and cannot be changed.",
    "draft-discarded": "Draft discarded. Its usage is kept; the month can be drafted again.",
    "price-added": "Price added. It applies from its start time on.",
    "price-added-not-served": "Price added. No model of this name is served: check its spelling.",
    "price-withdrawn": "Price withdrawn. The price in force is unchanged.",
    "request-cancelled": "Cancelled. Its KV blocks are free; generated tokens are billed.",
    "signed-out": "Signed out.",
    "session-over": "Your session had ended, so nothing was changed. Sign in again.",
    "sign-in-expired": "The sign-in expired or began in another browser. Start again.",
    "password-needed": "Your password is temporary. Choose a new one to continue.",
    "password-changed": "Password changed. All other devices are signed out.",
    "second-factor-off": "Second factor disabled. All other devices are signed out.",
    "session-ended": "The device is signed out.",
    "sessions-ended": "All other devices are signed out.",
}


@lru_cache(maxsize=256)
def asset(path: str) -> str:
    """Return the URL of a static file with part of its hash, so that browsers may cache it indefinitely."""
    digest = sha256((STATIC_DIR / path).read_bytes()).hexdigest()
    return f"/static/{path}?v={digest[:12]}"


def in_dialog(path: str) -> Markup:
    """Return the attributes of a link to a form: htmx shows it in the dialog; without scripts it has a page of its own."""
    return _IN_DIALOG.format(path)


def is_fragment_request(request: ConsoleRequest) -> bool:
    """Return whether htmx requests a fragment. To restore history it needs the whole page."""
    return request.headers.get("hx-request") == "true" and request.headers.get("hx-history-restore-request") != "true"


def toast_header(text: str, kind: str) -> str:
    """Return the `HX-Trigger` value that shows `text` as a toast; `kind` is `done` or `error`."""
    return json.dumps({"gatehouse:toast": {"text": text, "kind": kind}})


class Pages:
    """Renders templates, adding the values common to all pages: the signed-in person, theme, time, the last change."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._templates = Environment(
            loader=FileSystemLoader(WEB_DIR / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            template_filters(services.reports.calendar) | {"names_text": names_text, "sentence": sentence}
        )
        self._templates.globals.update(
            asset=asset,
            in_dialog=in_dialog,
            spark_area=spark_area,
            spark_points=spark_points,
            stack=stack,
            timeline=timeline,
            styles=STYLES,
            scripts=SCRIPTS,
            version=services.version,
            currency=services.settings.currency,
        )

    def now(self) -> datetime:
        """Return the time to which relative times on pages refer."""
        return self._services.clock.now()

    def fragment(self, template: str, **values: Any) -> str:
        """Render a template that needs no values from the request, for live streams."""
        return self._templates.get_template(template).render(now=self.now(), **values)

    def page(
        self, request: ConsoleRequest, template: str, *, part: str | None = None, status: int | None = None, **values: Any
    ) -> Html:
        """Render the whole page, or only its template `part` if htmx requests a fragment.

        The default `status` is 422 if the values contain a `form` (one that was sent and has errors), else 200.
        """
        if part is not None and is_fragment_request(request):
            template = part
        return self._respond(request, template, status, values)

    def sheet(self, request: ConsoleRequest, template: str, *, title: str, **values: Any) -> Html:
        """Render a form: for the dialog if htmx requests it, otherwise on a page of its own.

        The status is 422 if the values contain a `form` (one that was sent and has errors), else 200.
        """
        values |= {"title": title, "sheet": template, "scope": "sheet"}
        return self._respond(request, template if is_fragment_request(request) else "pages/sheet.html", None, values)

    def redirect(self, request: ConsoleRequest, path: str, *, done: str | None = None) -> Html:
        """Redirect after a change: 303 for a form, `HX-Redirect` for htmx. `done` is the key of a message in DONE."""
        headers = {"vary": "HX-Request, Cookie"}
        headers["hx-redirect" if is_fragment_request(request) else "location"] = path
        status = 200 if is_fragment_request(request) else 303
        answer = Response("", status_code=status, media_type=HTML, headers=headers)
        if done is not None:
            assert done in DONE
            answer.set_cookie(done_cookie(done, DONE_SHOWN_FOR_S))
        return answer

    def _respond(self, request: ConsoleRequest, template: str, status: int | None, values: dict[str, Any]) -> Html:
        if status is None:
            status = 422 if values.get("form") else 200
        done = request.cookies.get(DONE_COOKIE)
        text = self._templates.get_template(template).render(self._common_values(request) | values)
        answer = Response(text, status_code=status, media_type=HTML, headers={"vary": "HX-Request, Cookie"})
        if done is not None and not is_fragment_request(request):
            answer.set_cookie(done_cookie("", 0))
        return answer

    def _common_values(self, request: ConsoleRequest) -> dict[str, Any]:
        session = current_session(request)
        theme = request.cookies.get(THEME_COOKIE, "auto")
        return {
            "scope": "page",
            "now": self.now(),
            "path": request.scope["path"],
            "here": current_page_url(request),
            "theme": theme if theme in THEMES else "auto",
            "signed_in": session.member if session else None,
            "csrf_token": session.csrf_token if session else "",
            "may": partial(may, request),
            "sections": sections_of(request.state.get("access")),
            "may_change": may(request, "write"),
            "done": DONE.get(request.cookies.get(DONE_COOKIE, "")),
        }


def done_cookie(name: str, max_age_s: int) -> Cookie:
    """Return the cookie that carries the key of a message to the next page."""
    return Cookie(key=DONE_COOKIE, value=name, path="/", httponly=True, samesite="lax", max_age=max_age_s)
