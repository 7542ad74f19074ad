"""What a command names is found with one call by its id, and among everything by its name or prefix; limits by their names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from appliance.cli import keys, tenants
from appliance.cli.connection import AdminClient
from appliance.cli.failure import CommandFailed
from appliance.tenancy.principals import LIMIT_NAMES

TENANTS = [{"id": "tn_1", "name": "alice"}, {"id": "tn_2", "name": "tn_bob"}]
KEYS = [{"id": "key_1", "prefix": "gh_one", "tenant_id": "tn_1"}, {"id": "key_2", "prefix": "key_odd", "tenant_id": "tn_2"}]

Ask = Callable[[Callable[[AdminClient], Awaitable[Any]]], Awaitable[tuple[Any, list[str]]]]


def _answer(request: httpx.Request) -> httpx.Response:
    path = request.url.path.removeprefix("/admin/v1")
    if path == "/tenants":
        return httpx.Response(200, json={"data": TENANTS, "has_more": False, "next_cursor": None})
    if path.endswith("/keys"):
        found = [key for key in KEYS if f"/tenants/{key['tenant_id']}/keys" == path]
        return httpx.Response(200, json={"data": found, "has_more": False, "next_cursor": None})
    if path == "/tenants/tn_broken":
        return httpx.Response(503, json={"error": {"message": "draining", "code": "draining"}})
    for row in (*TENANTS, *KEYS):
        if path in (f"/tenants/{row['id']}", f"/keys/{row['id']}"):
            return httpx.Response(200, json=row)
    return httpx.Response(404, json={"error": {"message": "no such thing", "code": "not_found"}})


@pytest.fixture
def ask() -> Ask:
    """Run a look-up, and return what it found and the paths it asked for."""

    async def run(work: Callable[[AdminClient], Awaitable[Any]]) -> tuple[Any, list[str]]:
        paths: list[str] = []

        def answer(request: httpx.Request) -> httpx.Response:
            paths.append(request.url.raw_path.decode().partition("?")[0].removeprefix("/admin/v1"))
            return _answer(request)

        async with httpx.AsyncClient(base_url="http://box", transport=httpx.MockTransport(answer)) as client:
            return await work(AdminClient(client)), paths

    return run


async def test_a_tenant_is_found_by_its_id_with_one_call(ask: Ask) -> None:
    assert await ask(lambda client: tenants.find(client, "tn_2")) == (TENANTS[1], ["/tenants/tn_2"])


async def test_a_tenant_is_found_by_its_name(ask: Ask) -> None:
    assert await ask(lambda client: tenants.find(client, "alice")) == (TENANTS[0], ["/tenants"])


async def test_a_name_may_look_like_an_id(ask: Ask) -> None:
    assert await ask(lambda client: tenants.find(client, "tn_bob")) == (TENANTS[1], ["/tenants/tn_bob", "/tenants"])


async def test_a_key_is_found_by_its_id_with_one_call(ask: Ask) -> None:
    assert await ask(lambda client: keys.find_key(client, "key_2")) == (KEYS[1], ["/keys/key_2"])


@pytest.mark.parametrize(("prefix", "wanted"), [("gh_one", "key_1"), ("key_odd", "key_2")])
async def test_a_key_is_found_by_its_prefix(ask: Ask, prefix: str, wanted: str) -> None:
    found, _ = await ask(lambda client: keys.find_key(client, prefix))
    assert found["id"] == wanted


async def test_what_is_named_stays_one_part_of_the_path(ask: Ask) -> None:
    with pytest.raises(CommandFailed, match="no key"):
        await ask(lambda client: keys.find_key(client, "key_1/../key_2"))


async def test_only_an_absence_is_looked_for_elsewhere(ask: Ask) -> None:
    with pytest.raises(CommandFailed, match="draining"):
        await ask(lambda client: tenants.find(client, "tn_broken"))


def test_limits_are_told_by_name_and_each_has_an_option() -> None:
    given: dict[str, str | None] = dict.fromkeys(LIMIT_NAMES)
    assert tenants.limits_body(**given) == {}
    given |= {"tokens_per_minute": "1000", "concurrent_requests": "NONE", "monthly_budget": "0"}
    limits = {"tokens_per_minute": 1000, "concurrent_requests": None, "monthly_budget": 0}
    assert tenants.limits_body(**given) == {"limits": limits}
    with pytest.raises(CommandFailed, match=r"--tokens-per-day must be a whole number .*, not '-1'"):
        tenants.limits_body(**{**given, "tokens_per_day": "-1"})
