"""The context of console handlers: the request, the services, the templates, and state shared between requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from litestar.di import NamedDependency

from appliance.base.errors import Unauthenticated
from appliance.base.settings import local_url
from appliance.console.forms import Form
from appliance.console.login_attempts import LoginAttempts
from appliance.console.overview_view import LatestOverview
from appliance.console.rendering import Html, Pages
from appliance.console.security import ConsoleRequest, access_of, current_session, form_of

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.tenancy.access import Access
    from appliance.tenancy.sessions import Session


class Console:
    """State shared by all console requests; created once by `create_console_router`."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.pages = Pages(services)
        self.attempts = LoginAttempts(services.clock)
        self.overview = LatestOverview(services)
        self.open_streams: Counter[str] = Counter()  # number of live streams by member id
        # Rendered frames of the newest sample, by view and access; filled by `live_stream`.
        self.frames_at = ""
        self.frames: dict[tuple[str, str, frozenset[tuple[str, str]]], bytes] = {}

    def example(self, may_use: Callable[[str], bool] = lambda _model: True) -> dict[str, Any]:
        """Return the values for the example curl command: the URL of this appliance and the first usable model."""
        settings = self.services.settings
        names = [model.name for model in self.services.models.list() if may_use(model.name)]
        address = settings.external_url or local_url(settings.host, settings.port)
        return {"address": address, "first_model": names[0] if names else "MODEL"}


class Context:
    """One request to the console: its session, access, parameters and form, and methods to respond."""

    def __init__(self, console: Console, request: ConsoleRequest) -> None:
        self.console = console
        self.request = request
        self.services = console.services
        self.attempts = console.attempts

    @property
    def access(self) -> Access:
        """Return the access of the signed-in member. Raises Unauthenticated."""
        return access_of(self.request)

    @property
    def session(self) -> Session:
        """Return the session of this request. Raises Unauthenticated."""
        session = current_session(self.request)
        if session is None:
            raise Unauthenticated("Sign in first.")
        return session

    @property
    def address(self) -> str:
        """Return the network address of the client."""
        return self.request.client.host if self.request.client else "unknown"

    @property
    def query(self) -> Mapping[str, str]:
        """Return the query parameters; the first value of a repeated one."""
        return self.request.query_params

    @property
    def model_names(self) -> list[str]:
        """Return the names of the served models."""
        return [model.name for model in self.services.models.list()]

    async def form(self) -> Form:
        """Return the form fields of the request, without uploaded files."""
        return Form({name: value for name, value in (await form_of(self.request)).items() if isinstance(value, str)})

    def page(self, template: str, *, part: str | None = None, status: int | None = None, **values: Any) -> Html:
        """Answer as `Pages.page` does."""
        return self.console.pages.page(self.request, template, part=part, status=status, **values)

    def sheet(self, template: str, *, title: str, **values: Any) -> Html:
        """Answer as `Pages.sheet` does."""
        return self.console.pages.sheet(self.request, template, title=title, **values)

    def redirect(self, path: str, *, done: str | None = None) -> Html:
        """Answer as `Pages.redirect` does."""
        return self.console.pages.redirect(self.request, path, done=done)


ContextDependency = NamedDependency[Context]
"""Declares the context parameter of a handler."""
