"""The overview: what the box does now. The same fragment serves the first paint and every tick."""

from __future__ import annotations

from litestar import get

from appliance.console.context import Console, ConsoleDependency
from appliance.console.rendering import Html
from appliance.console.security import ConsoleRequest, may
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action


@get("/")
async def show_overview(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """The live board of the box; members without a role on the box are sent to their tenants."""
    if not may(request, Action.READ_BOX):
        return console.pages.redirect(request, "/tenants")
    view = await console.board.overview()
    return console.pages.page(request, "pages/overview.html", view=view, **console.example())


async def overview_fragment(console: Console, access: Access) -> str:
    """Return the live part of the page; it is the same for every role on the box."""
    access.require(Action.READ_BOX)
    view = await console.board.overview()
    return console.pages.fragment("fragments/overview.html", view=view, **console.example())


HANDLERS = (show_overview,)
