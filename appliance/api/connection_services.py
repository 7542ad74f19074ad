"""Where handlers find the appliance's services: in the state of the application, put there by the composition root."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection

from appliance.serving.services import Services


def services_of(connection: ASGIConnection[Any, Any, Any, Any]) -> Services:
    """Return the services of the application that serves `connection`."""
    services: Services = connection.app.state.services
    return services
