"""Every route of the HTTP interface except the console's pages."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from litestar import Router
from litestar.handlers import HTTPRouteHandler

from appliance.api import chat, health, models
from appliance.api.admin import (
    audit,
    economics,
    invoices,
    limit_check,
    limits,
    members,
    requests,
    sessions,
    system,
    tenants,
    usage,
    webhooks,
)
from appliance.api.organization import admin as organization_admin
from appliance.api.organization import limits as organization_limits
from appliance.api.organization import projects as organization_projects
from appliance.api.organization import usage as organization_usage

ADMIN = (tenants, members, sessions, limits, limit_check, usage, invoices, economics, requests, webhooks, audit, system)
ORGANIZATION = (organization_usage, organization_projects, organization_limits, organization_admin)


def api_routers() -> Sequence[Router]:
    """Return the tenants' API, OpenAI's organization API, health and metrics, and the administrators' API under `/admin/v1`."""
    return [
        Router("/", route_handlers=_handlers(chat, models), tags=["inference"]),
        Router("/v1/organization", route_handlers=_handlers(*ORGANIZATION), tags=["administration"]),
        Router("/organization", route_handlers=_handlers(*ORGANIZATION), tags=["administration"]),
        Router("/", route_handlers=_handlers(health), tags=["health"]),
        Router("/admin/v1", route_handlers=_handlers(*ADMIN), tags=["administration"]),
    ]


def _handlers(*modules: ModuleType) -> list[HTTPRouteHandler]:
    """Return the handlers that these modules define, in source order."""
    return [value for module in modules for value in vars(module).values() if isinstance(value, HTTPRouteHandler)]
