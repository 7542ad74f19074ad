"""The overview: what the box does now. The same fragment serves the first paint and every tick."""

from __future__ import annotations

from litestar import get

from appliance.console.context import Console, ContextDependency
from appliance.console.rendering import Html
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action


@get("/")
async def show_overview(context: ContextDependency) -> Html:
    """The live board of the box; members without a role on the box are sent to their tenants."""
    if not context.access.may(Action.READ_BOX):
        return context.redirect("/tenants")
    view = await context.console.board.overview()
    return context.page("pages/overview.html", view=view, **context.console.example())


async def overview_fragment(console: Console, access: Access) -> str:
    """Return the live part of the page; it is the same for every role on the box."""
    access.require(Action.READ_BOX)
    view = await console.board.overview()
    return console.pages.fragment("fragments/overview.html", view=view, **console.example())
