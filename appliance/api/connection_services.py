"""How handlers get the appliance's services: from the application's state, where the composition root puts them."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection

from appliance.serving.services import Services


def services_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Services:
    """Return the services of the application that serves `connection`."""
    services: Services = connection.app.state.services
    return services
