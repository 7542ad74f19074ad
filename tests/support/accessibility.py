"""Finds violations of accessibility rules in a page of the console, in both colour schemes."""

from __future__ import annotations

from typing import Any, Literal

from axe_playwright_python.async_playwright import Axe  # type: ignore[import-untyped]
from playwright.async_api import Page

SERIOUS = ("serious", "critical")
RULES: tuple[tuple[Literal["light", "dark"], dict[str, Any]], ...] = (
    ("light", {"resultTypes": ["violations"]}),
    ("dark", {"resultTypes": ["violations"], "runOnly": ["color-contrast", "link-in-text-block"]}),
)


async def violations(page: Page) -> list[str]:
    """Return the serious violations that axe finds, with their elements."""
    found = []
    for scheme, options in RULES:
        await page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        rules = [rule for rule in (await Axe().run(page, options=options)).response["violations"] if rule["impact"] in SERIOUS]
        found += [f"{scheme}: {rule['id']}: {[node['html'][:120] for node in rule['nodes']]}" for rule in rules]
    await page.emulate_media(color_scheme="light", reduced_motion="reduce")
    return found
