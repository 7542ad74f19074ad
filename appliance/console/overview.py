"""The overview: what the box does now. The same fragment serves the first paint and every tick."""

from __future__ import annotations

from litestar import get

from appliance.console.context import Console, ConsoleDependency
from appliance.console.rendering import Html
from appliance.console.security import ConsoleRequest


@get("/")
async def show_overview(request: ConsoleRequest, console: ConsoleDependency) -> Html:
    """The live board."""
    view = await console.board.overview()
    return console.pages.page(request, "pages/overview.html", view=view, **console.example())


async def overview_fragment(console: Console, *, changing: bool) -> str:
    """Return the live part of the page; it is the same for every role."""
    view = await console.board.overview()
    return console.pages.fragment("fragments/overview.html", view=view, may_change=changing, **console.example())
