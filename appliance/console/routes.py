"""Assembles the console: routes, guards and static files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from litestar import Response, Router
from litestar.di import Provide
from litestar.exceptions import NotFoundException
from litestar.handlers import BaseRouteHandler
from litestar.static_files import create_static_files_router

from appliance.base.errors import GatehouseError
from appliance.console import (
    account,
    alerts,
    appliance_settings,
    audit,
    invoices,
    keys,
    limit_check,
    live_stream,
    login,
    login_code,
    login_oidc,
    members,
    month_closing,
    overview,
    prices,
    requests,
    second_factor,
    seller,
    server_costs,
    tenant_members,
    tenant_terms,
    tenants,
    usage,
)
from appliance.console.context import Console, Context
from appliance.console.error_pages import error_handler
from appliance.console.rendering import STATIC_DIR
from appliance.console.security import Connection, ConsoleRequest, SecurityHeaders, require_csrf_token, session_guard

if TYPE_CHECKING:
    from appliance.serving.services import Services

MODULES = (
    login, login_code, login_oidc, account, second_factor, overview, live_stream, requests, tenants, tenant_terms,
    tenant_members, keys, limit_check, usage, invoices, month_closing, prices, members, alerts, audit, appliance_settings,
    seller, server_costs,
)  # fmt: skip
FORM_BYTES_MAX = 64 * 1024
NAME_BYTES_MAX = 255
PATH_CHARS_MAX = 1000
# The URL of a static file changes with its content, so browsers may cache it indefinitely.
STATIC_KEPT = "public, max-age=31536000, immutable"


def create_console_router(services: Services) -> Router:
    """Return the router with all pages of the console and its static files."""
    console = Console(services)

    def provide_context(request: ConsoleRequest) -> Context:
        return Context(console, request)

    pages = Router(
        path="/",
        route_handlers=[
            member for module in MODULES for member in vars(module).values() if isinstance(member, BaseRouteHandler)
        ],
        dependencies={"context": Provide(provide_context, sync_to_thread=False)},
        guards=[session_guard(services)],
        before_request=require_csrf_token,
        exception_handlers={Exception: error_handler(console.pages), GatehouseError: error_handler(console.pages)},
        include_in_schema=False,
        request_max_body_size=FORM_BYTES_MAX,
    )
    return Router(path="/", route_handlers=[pages, _static_files()], middleware=[SecurityHeaders()])


def _static_files() -> Router:
    return create_static_files_router(
        path="/static",
        directories=[STATIC_DIR],
        guards=[_check_path],
        include_in_schema=False,
        after_request=_allow_caching,
    )


def _check_path(connection: Connection, _handler: BaseRouteHandler) -> None:
    """Raise NotFoundException for a path that the file system would reject with an error."""
    path = connection.scope["path"]
    if len(path) > PATH_CHARS_MAX or any(len(part.encode()) > NAME_BYTES_MAX for part in path.split("/")):
        raise NotFoundException


def _allow_caching(response: Response[bytes]) -> Response[bytes]:
    response.headers["cache-control"] = STATIC_KEPT
    return response
