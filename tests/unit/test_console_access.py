"""Access control of the console: sign-in, roles, CSRF tokens, cross-site requests, security headers and malformed requests."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from litestar.handlers import BaseRouteHandler

import appliance.console
from appliance.console.routes import MODULES
from appliance.console.security import CONTENT_SECURITY_POLICY, safe_next
from tests.support.cast import ALICE_PASSWORD, OWNER
from tests.support.clock import FakeClock
from tests.support.console_fixtures import Browser, ConsoleApp

PAGES = ("/", "/requests", "/tenants", "/tenants/new", "/keys", "/console/events")


def state_changing_paths(console: ConsoleApp) -> list[str]:
    """Return the paths of all state-changing requests, for a tenant and a key that exist."""
    tenant, key = console.cast.bob.tenant.id, console.cast.bob.key.id
    of_tenant = [f"/tenants/{tenant}{action}" for action in ("", "/suspend", "/resume", "/archive", "/keys")]
    of_key = [f"/keys/{key}{action}" for action in ("", "/rotate", "/revoke")]
    return ["/tenants", "/requests/cancel", *of_tenant, *of_key]


def test_every_console_module_with_handlers_is_routed() -> None:
    written = [
        importlib.import_module(found.name) for found in pkgutil.iter_modules(appliance.console.__path__, "appliance.console.")
    ]

    assert set(MODULES) == {
        module for module in written if any(isinstance(value, BaseRouteHandler) for value in vars(module).values())
    }


@pytest.mark.parametrize("path", PAGES)
async def test_an_anonymous_request_is_redirected_to_the_sign_in_page_with_the_way_back(console: ConsoleApp, path: str) -> None:
    answer = await console.visitor().get(path)

    assert answer.status_code == 303
    assert answer.headers["location"] == ("/login" if path == "/" else f"/login?next={path.replace('/', '%2F')}")


async def test_an_anonymous_htmx_request_redirects_the_whole_window_to_the_sign_in_page(console: ConsoleApp) -> None:
    answer = await console.visitor().fragment("/requests")

    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/login")


@pytest.mark.parametrize(
    ("sent", "headers"),
    [
        ("part", {"hx-request": "true", "hx-current-url": "http://gatehouse.example:8000/requests?q=gh_1&state="}),
        ("form", {"referer": "http://gatehouse.example:8000/requests?q=gh_1&state="}),
        ("form", {"hx-request": "true", "hx-current-url": "http://evil.example/requests?q=gh_1&state="}),
    ],
)
async def test_after_an_expired_session_sign_in_returns_to_the_page_that_was_open(
    console: ConsoleApp, sent: str, headers: dict[str, str]
) -> None:
    visitor = console.visitor()

    answer = await (visitor.get("/tenants/new", **headers) if sent == "part" else visitor.post_with(headers, "/tenants"))

    sign_in_url = answer.headers.get("hx-redirect") or answer.headers["location"]
    assert sign_in_url == "/login?next=%2Frequests%3Fq%3Dgh_1%26state%3D"
    assert ("Your session had ended, so nothing was changed." in (await visitor.get(sign_in_url)).text) is (sent == "form")


@pytest.mark.parametrize("page", ["http://[", "//evil.example", "", "http://gatehouse.example\\evil/", "mailto:x"])
async def test_an_unsafe_current_url_is_not_carried_to_the_sign_in_page(console: ConsoleApp, page: str) -> None:
    answer = await console.visitor().get("/tenants/new", **{"hx-request": "true", "hx-current-url": page})

    assert answer.headers["hx-redirect"] == "/login"


async def test_an_anonymous_visitor_changes_nothing(console: ConsoleApp) -> None:
    for path in state_changing_paths(console):
        answer = await console.visitor().post(path, name="mallory")

        assert (answer.status_code, answer.headers["location"]) == (303, "/login"), path

    assert not (await console.services.tenants.get(console.cast.bob.tenant.id, access=OWNER)).suspended


async def test_a_viewer_sees_every_page_without_buttons_that_change_something(console: ConsoleApp) -> None:
    vera = await console.vera()
    console.engine_side.add(console.cast.bob, "req_live")

    for path in (
        "/",
        "/requests",
        "/tenants",
        f"/tenants/{console.cast.bob.tenant.id}",
        f"/keys/{console.cast.bob.key.id}",
        "/keys",
    ):
        answer = await vera.get(path)

        assert answer.status_code == 200, path
        for word in ("New tenant", "New key", "/revoke", "/rotate", "Cancel", "/archive", ">Save<"):
            assert word not in answer.text, (path, word)


async def test_every_change_by_a_viewer_is_forbidden(console: ConsoleApp) -> None:
    vera = await console.vera()
    console.engine_side.add(console.cast.bob, "req_live")

    for path in state_changing_paths(console):
        answer = await vera.post(path, name="vera", request_id="req_live", confirm="bob")

        assert answer.status_code == 403, path

    assert console.engine_side.aborted == []
    assert (await console.services.keys.get(console.cast.bob.key.id, access=OWNER)).revoked_at is None


async def test_a_form_without_csrf_token_changes_nothing(console: ConsoleApp) -> None:
    alice = await console.alice()
    alice.csrf_token = ""

    for path in state_changing_paths(console):
        answer = await alice.post(path, name="alice", confirm="bob")

        assert answer.status_code == 403, path
        assert "older session" in answer.text

    tenant = await console.services.tenants.get(console.cast.bob.tenant.id, access=OWNER)
    assert (tenant.name, tenant.suspended, tenant.archived) == ("bob", False, False)


async def test_the_csrf_token_of_another_session_is_refused(console: ConsoleApp) -> None:
    alice, vera = await console.alice(), await console.vera()
    alice.csrf_token = vera.csrf_token

    answer = await alice.post(f"/tenants/{console.cast.bob.tenant.id}/suspend")

    assert answer.status_code == 403


async def test_the_csrf_token_may_be_sent_in_a_header(console: ConsoleApp) -> None:
    alice = await console.alice()
    headers = {"X-CSRF-Token": alice.csrf_token}
    alice.csrf_token = ""

    answer = await alice.post_with({"HX-Request": "true", **headers}, f"/tenants/{console.cast.bob.tenant.id}/suspend")

    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://gatehouse.test"},
    ],
)
async def test_a_cross_site_form_is_refused_even_with_a_valid_csrf_token(console: ConsoleApp, headers: dict[str, str]) -> None:
    alice = await console.alice()

    answer = await alice.post_with(headers, f"/tenants/{console.cast.bob.tenant.id}/suspend")

    assert answer.status_code == 403
    assert "another site" in answer.text


@pytest.mark.parametrize(
    ("origin", "status"), [("http://evil.test", 403), ("null", 403), ("http://[", 403), ("https://gatehouse.test", 303)]
)
async def test_without_fetch_metadata_the_origin_must_have_the_host_of_the_request(
    console: ConsoleApp, origin: str, status: int
) -> None:
    alice = await console.alice()
    fields = {"csrf_token": alice.csrf_token}

    answer = await alice.http.post(f"/tenants/{console.cast.bob.tenant.id}/suspend", data=fields, headers={"Origin": origin})

    assert answer.status_code == status


@pytest.mark.parametrize("host", ["gatehouse.test:x", "gatehouse.test:99999", "a:b:c"])
async def test_an_invalid_host_header_causes_no_server_error(console: ConsoleApp, host: str) -> None:
    alice = await console.alice()
    pages = {path: await alice.http.get(path, headers={"Host": host}) for path in ("/login", "/account", "/tenants/nothing")}
    unknown = await console.visitor().http.get("/keys?page=2", headers={"Host": host})

    assert [answer.status_code for answer in pages.values()] == [303, 200, 404]
    assert (unknown.status_code, unknown.headers["location"]) == (303, "/login?next=%2Fkeys%3Fpage%3D2")


@pytest.mark.parametrize("fields", [{"model": "a\0b"}, {"a\0b": "demo"}])
async def test_a_form_with_a_null_character_is_refused(console: ConsoleApp, fields: dict[str, str]) -> None:
    answer = await (await console.alice()).post("/settings/models", limit_mode="enforce", **fields)

    assert answer.status_code == 400
    assert "U+0000" in answer.text


async def test_a_cross_site_sign_in_is_refused(console: ConsoleApp) -> None:
    answer = await console.visitor().post_with(
        {"Sec-Fetch-Site": "cross-site"}, "/login", email="alice@example.com", password=ALICE_PASSWORD
    )

    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


async def test_every_response_has_the_security_headers(console: ConsoleApp) -> None:
    alice = await console.alice()
    answers = [
        await alice.get("/"),
        await alice.get("/tenants/nobody"),
        await alice.post("/tenants"),
        await console.visitor().get("/"),
        await console.visitor().get("/login"),
        await alice.get("/static/css/base.css"),
        await alice.get("/static/css/missing.css"),
    ]

    for answer in answers:
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY, answer.url
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "same-origin"


async def test_pages_are_never_cached_and_static_files_are_immutable(console: ConsoleApp) -> None:
    alice = await console.alice()

    for path in ("/", "/login", "/usage.csv", "/tenants/none", "/nowhere"):
        assert (await alice.get(path)).headers.get_list("cache-control") == ["no-store"], path
    assert (await console.visitor().get("/")).headers.get_list("cache-control") == ["no-store"], (
        "the redirect to the sign-in page"
    )
    assert "HX-Request" in (await alice.get("/requests")).headers["vary"]
    assert "immutable" in (await alice.get("/static/js/live.js")).headers["cache-control"]


@pytest.mark.parametrize("path", ["/static/../appliance/app.py", "/static/%2e%2e/templates/pages/login.html", "/static/"])
async def test_path_traversal_out_of_the_static_folder_is_refused(console: ConsoleApp, path: str) -> None:
    assert (await (await console.alice()).get(path)).status_code in (303, 404)


async def test_a_session_past_its_idle_limit_has_ended(console: ConsoleApp, clock: FakeClock) -> None:
    alice = await console.alice()
    clock.advance(8 * 3600 + 1)

    assert (await alice.get("/tenants")).status_code == 303


async def test_an_invented_session_cookie_is_refused(console: ConsoleApp) -> None:
    mallory: Browser = console.visitor()
    mallory.http.cookies.set("gatehouse_session", "x" * 43)

    assert (await mallory.get("/tenants")).status_code == 303


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/requests?tenant=a", "/requests?tenant=a"),
        ("", "/"),
        (None, "/"),
        ("//evil.test/x", "/"),
        ("https://evil.test", "/"),
        ("/\\evil.test", "/"),
        ("/a\r\nSet-Cookie: x", "/"),
        ("requests", "/"),
        ("/requests?tenant=é&x=%C3%A9", "/requests?tenant=%C3%A9&x=%C3%A9"),
        ("/\ud800", "/?"),
    ],
)
def test_the_redirect_after_signing_in_stays_on_this_site(target: str | None, expected: str) -> None:
    assert safe_next(target) == expected


async def test_a_form_in_an_unknown_charset_is_a_bad_request(console: ConsoleApp) -> None:
    part = (
        "--b\r\nContent-Disposition: form-data; name=email\r\nContent-Type: text/plain; charset=klingon\r\n\r\nx\r\n--b--\r\n"
    )
    headers = {"content-type": "multipart/form-data; boundary=b", "sec-fetch-site": "same-origin"}
    for browser in (console.visitor(), await console.alice()):
        answer = await browser.http.post("/login", content=part, headers=headers)

        assert answer.status_code == 400


@pytest.mark.parametrize(("name", "status"), [("a" * 300, 404), ("%C3%A9" * 200, 404), ("a/" * 3000, 404), ("a%00b", 400)])
async def test_an_impossible_static_path_is_a_client_error(console: ConsoleApp, name: str, status: int) -> None:
    assert (await console.visitor().get(f"/static/{name}")).status_code == status


async def test_the_redirect_after_signing_in_percent_encodes_non_ascii_characters(console: ConsoleApp) -> None:
    answer = await console.visitor().post("/login", email="alice@example.com", password=ALICE_PASSWORD, next="/tenants?q=漢")

    assert (answer.status_code, answer.headers["location"]) == (303, "/tenants?q=%E6%BC%A2")


async def test_a_form_over_the_size_limit_is_refused_with_413(console: ConsoleApp) -> None:
    assert (await console.visitor().post("/login", email="a@b", password="x" * 100_000)).status_code == 413
