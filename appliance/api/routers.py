"""Every route of the HTTP interface except the console's pages."""

from __future__ import annotations

from collections.abc import Sequence

from litestar import Router
from litestar.types import ControllerRouterHandler

from appliance.api import (
    admin_audit,
    admin_economics,
    admin_invoices,
    admin_limit_check,
    admin_limits,
    admin_members,
    admin_requests,
    admin_sessions,
    admin_system,
    admin_tenants,
    admin_usage,
    admin_webhooks,
    health,
    organization_admin,
    organization_limits,
    organization_projects,
    organization_usage,
)
from appliance.api.chat import create_chat_completion
from appliance.api.models import list_models, retrieve_model


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
