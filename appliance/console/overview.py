"""The overview: the current state of the appliance. One fragment serves the first load and the live updates."""

from __future__ import annotations

from litestar import get

from appliance.console.context import Console, ContextDependency
from appliance.console.rendering import Html
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Action


@get("/")
async def show_overview(context: ContextDependency) -> Html:
    """The overview; members without a role on the appliance are redirected to their tenants."""
    if not context.access.may(Action.READ_APPLIANCE):
        return context.redirect("/tenants")
    view = await context.console.overview.view()
    return context.page("pages/overview.html", view=view, **context.console.example())


async def overview_fragment(console: Console, access: Access) -> str:
    """Render the live part of the page, which is the same for every role on the appliance."""
    access.require(Action.READ_APPLIANCE)
    view = await console.overview.view()
    return console.pages.fragment("fragments/overview.html", view=view, **console.example())
