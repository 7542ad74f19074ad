"""What every handler of the console gets: the services, the templates, and the little state that outlives one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from litestar.di import NamedDependency

from appliance.base.settings import local_url
from appliance.console.forms import Form
from appliance.console.live_board import LiveBoard
from appliance.console.login_attempts import LoginAttempts
from appliance.console.rendering import Pages
from appliance.console.security import ConsoleRequest, form_of

if TYPE_CHECKING:
    from appliance.serving.services import Services


class Console:
    """One per appliance; made by `create_console_router`."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.pages = Pages(services)
        self.attempts = LoginAttempts(services.clock)
        self.board = LiveBoard(services)
        self.open_streams: Counter[str] = Counter()  # live pages by the id of their member
        # The frames of the newest sample, by view and by the access of their readers; filled by `live_stream`.
        self.frames_at = ""
        self.frames: dict[tuple[str, str, frozenset[tuple[str, str]]], bytes] = {}

    async def form(self, request: ConsoleRequest) -> Form:
        """Return the fields in the request, without uploaded files."""
        return Form({name: value for name, value in (await form_of(request)).items() if isinstance(value, str)})

    def example(self, may_use: Callable[[str], bool] = lambda _model: True) -> dict[str, Any]:
        """Return the values for a ready curl line: the address of this appliance and the first model that may be used."""
        settings = self.services.settings
        names = [model.name for model in self.services.models.list() if may_use(model.name)]
        address = settings.external_url or local_url(settings.host, settings.port)
        return {"address": address, "first_model": names[0] if names else "MODEL"}


ConsoleDependency = NamedDependency[Console]
"""How a handler asks for the console."""
