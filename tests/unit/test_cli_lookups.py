"""Looking up tenants and keys by id, name or prefix, and options of limits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from appliance.base.ids import new_id
from appliance.cli import keys, tenants
from appliance.cli.connection import AdminClient
from appliance.cli.failure import CommandFailed
from appliance.cli.limit_options import LimitOptions
from appliance.tenancy.principals import LIMIT_NAMES

ALICE, BOB, LIKE_AN_ID, BROKEN = (new_id("tn") for _ in range(4))
ONE, TWO = (new_id("key") for _ in range(2))
TENANTS = [{"id": ALICE, "name": "alice"}, {"id": BOB, "name": LIKE_AN_ID}]
KEYS = [{"id": ONE, "prefix": "gh_one", "tenant_id": ALICE}, {"id": TWO, "prefix": "key_odd", "tenant_id": BOB}]

LookUp = Callable[[Callable[[AdminClient], Awaitable[Any]]], Awaitable[tuple[Any, list[str]]]]


def _answer(request: httpx.Request) -> httpx.Response:
    path = request.url.path.removeprefix("/admin/v1")
    if path == "/tenants":
        return httpx.Response(200, json={"data": TENANTS, "has_more": False, "next_cursor": None})
    if path.endswith("/keys"):
        found = [key for key in KEYS if f"/tenants/{key['tenant_id']}/keys" == path]
        return httpx.Response(200, json={"data": found, "has_more": False, "next_cursor": None})
    if path == f"/tenants/{BROKEN}":
        return httpx.Response(503, json={"error": {"message": "draining", "code": "draining"}})
    for row in (*TENANTS, *KEYS):
        if path in (f"/tenants/{row['id']}", f"/keys/{row['id']}"):
            return httpx.Response(200, json=row)
    return httpx.Response(404, json={"error": {"message": "no such thing", "code": "not_found"}})


@pytest.fixture
def look_up() -> LookUp:
    """Run a look-up against a fake API; return its result and the paths that it requested."""

    async def run(work: Callable[[AdminClient], Awaitable[Any]]) -> tuple[Any, list[str]]:
        paths: list[str] = []

        def answer(request: httpx.Request) -> httpx.Response:
            paths.append(request.url.raw_path.decode().partition("?")[0].removeprefix("/admin/v1"))
            return _answer(request)

        async with httpx.AsyncClient(base_url="http://appliance", transport=httpx.MockTransport(answer)) as client:
            return await work(AdminClient(client)), paths

    return run


async def test_a_tenant_is_found_by_id_with_one_call(look_up: LookUp) -> None:
    assert await look_up(lambda client: tenants.find_tenant(client, BOB)) == (TENANTS[1], [f"/tenants/{BOB}"])


async def test_a_tenant_is_found_by_name(look_up: LookUp) -> None:
    assert await look_up(lambda client: tenants.find_tenant(client, "alice")) == (TENANTS[0], ["/tenants"])


async def test_a_tenant_whose_name_looks_like_an_id_is_found_by_name(look_up: LookUp) -> None:
    paths = [f"/tenants/{LIKE_AN_ID}", "/tenants"]
    assert await look_up(lambda client: tenants.find_tenant(client, LIKE_AN_ID)) == (TENANTS[1], paths)


async def test_a_key_is_found_by_id_with_one_call(look_up: LookUp) -> None:
    assert await look_up(lambda client: keys.find_key(client, TWO)) == (KEYS[1], [f"/keys/{TWO}"])


@pytest.mark.parametrize(("prefix", "wanted"), [("gh_one", ONE), ("key_odd", TWO)])
async def test_a_key_is_found_by_prefix(look_up: LookUp, prefix: str, wanted: str) -> None:
    found, _ = await look_up(lambda client: keys.find_key(client, prefix))
    assert found["id"] == wanted


@pytest.mark.parametrize("ending", ["/../{two}", "/rotate", "%2F{two}", "\udcff"])
async def test_only_a_valid_id_becomes_part_of_a_path(look_up: LookUp, ending: str) -> None:
    with pytest.raises(CommandFailed, match="no key"):
        await look_up(lambda client: keys.find_key(client, ONE + ending.format(two=TWO)))


async def test_only_not_found_falls_back_to_a_search_by_name(look_up: LookUp) -> None:
    with pytest.raises(CommandFailed, match="draining"):
        await look_up(lambda client: tenants.find_tenant(client, BROKEN))


def test_every_limit_has_an_option_and_only_given_ones_are_sent() -> None:
    given: dict[str, str | None] = dict.fromkeys(LIMIT_NAMES)
    assert LimitOptions(**given).body() == {}
    given |= {"tokens_per_minute": "1000", "concurrent_requests": "NONE", "monthly_budget": "0"}
    limits = {"tokens_per_minute": 1000, "concurrent_requests": None, "monthly_budget": 0}
    assert LimitOptions(**given).body() == {"limits": limits}
    with pytest.raises(CommandFailed, match=r"--tokens-per-day must be a whole number .*, not '-1'"):
        LimitOptions(**{**given, "tokens_per_day": "-1"}).body()
