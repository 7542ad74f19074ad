"""Reuses an application for several appliances: registering all routes and compiling page templates takes longer than most
tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest import mock

from litestar import Litestar

from appliance.console import routes
from appliance.console.context import Console
from appliance.serving.services import Services


class ReusedApp:
    """An application that delegates to the services of one appliance after another, all with the same settings."""

    def __init__(self, services: Services, create: Callable[[Services], Litestar]) -> None:
        self.services = services
        with mock.patch.object(routes, "Console", self._make_console):
            self.app = create(cast(Services, self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.services, name)

    def serve(self, services: Services) -> None:
        """Use these services from now on. Of the console's state, only its templates are kept."""
        self.services = services
        fresh = vars(Console(cast(Services, self)))
        vars(self._console).update({name: value for name, value in fresh.items() if name != "pages"})

    def _make_console(self, services: Services) -> Console:
        self._console = Console(services)
        return self._console
