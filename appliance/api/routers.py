"""Every route of the HTTP interface except the console's pages."""

from __future__ import annotations

from collections.abc import Sequence

from litestar import Router
from litestar.types import ControllerRouterHandler

from appliance.api import health
from appliance.api.admin import audit as admin_audit
from appliance.api.admin import economics as admin_economics
from appliance.api.admin import invoices as admin_invoices
from appliance.api.admin import limit_check as admin_limit_check
from appliance.api.admin import limits as admin_limits
from appliance.api.admin import members as admin_members
from appliance.api.admin import requests as admin_requests
from appliance.api.admin import sessions as admin_sessions
from appliance.api.admin import system as admin_system
from appliance.api.admin import tenants as admin_tenants
from appliance.api.admin import usage as admin_usage
from appliance.api.admin import webhooks as admin_webhooks
from appliance.api.chat import create_chat_completion
from appliance.api.models import list_models, retrieve_model
from appliance.api.organization import admin as organization_admin
from appliance.api.organization import limits as organization_limits
from appliance.api.organization import projects as organization_projects
from appliance.api.organization import usage as organization_usage


def api_routers() -> Sequence[ControllerRouterHandler]:
    """Return the tenants' API, OpenAI's organization API, health and metrics, and the administrators' API under `/admin/v1`."""
    admin = Router(
        path="/admin/v1",
        route_handlers=[
            *admin_tenants.HANDLERS,
            *admin_members.HANDLERS,
            *admin_sessions.HANDLERS,
            *admin_limits.HANDLERS,
            *admin_limit_check.HANDLERS,
            *admin_usage.HANDLERS,
            *admin_invoices.HANDLERS,
            *admin_economics.HANDLERS,
            *admin_requests.HANDLERS,
            *admin_webhooks.HANDLERS,
            *admin_audit.HANDLERS,
            *admin_system.HANDLERS,
        ],
    )
    organization = [
        *organization_usage.HANDLERS,
        *organization_projects.HANDLERS,
        *organization_limits.HANDLERS,
        *organization_admin.HANDLERS,
    ]
    return [create_chat_completion, list_models, retrieve_model, *organization, *health.HANDLERS, admin]
