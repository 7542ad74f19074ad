"""Every route of the HTTP interface except the console's pages."""

from __future__ import annotations

from collections.abc import Sequence

from litestar import Router

from appliance.api import health
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
from appliance.api.chat import create_chat_completion
from appliance.api.models import list_models, retrieve_model
from appliance.api.organization import admin as organization_admin
from appliance.api.organization import limits as organization_limits
from appliance.api.organization import projects as organization_projects
from appliance.api.organization import usage as organization_usage

ADMIN = (tenants, members, sessions, limits, limit_check, usage, invoices, economics, requests, webhooks, audit, system)
ORGANIZATION = (organization_usage, organization_projects, organization_limits, organization_admin)


def api_routers() -> Sequence[Router]:
    """Return the tenants' API, OpenAI's organization API, health and metrics, and the administrators' API under `/admin/v1`."""
    organization = [handler for module in ORGANIZATION for handler in module.HANDLERS]
    admin = [handler for module in ADMIN for handler in module.HANDLERS]
    return [
        Router("/", route_handlers=[create_chat_completion, list_models, retrieve_model], tags=["inference"]),
        Router("/v1/organization", route_handlers=organization, tags=["administration"]),
        Router("/organization", route_handlers=organization, tags=["administration"]),
        Router("/", route_handlers=health.HANDLERS, tags=["health"]),
        Router("/admin/v1", route_handlers=admin, tags=["administration"]),
    ]
