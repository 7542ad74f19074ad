"""`/admin/v1/sessions`: members see and end their own sessions, owners those of all members."""

from __future__ import annotations

import pyotp

from appliance.tenancy.browser_rules import CSRF_HEADER, PLAIN_COOKIE
from appliance.tenancy.id_tokens import Identity
from appliance.tenancy.members import Member
from tests.support.api_app import ApiApp

PASSWORD = "a password of tests"
FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"


async def browser(api: ApiApp, member: Member) -> tuple[str, dict[str, str]]:
    """The id of a new session, and the headers that its browser sends."""
    token, session = await api.services.sessions.open(member.id, FIREFOX, "192.0.2.7", method="password+totp")
    cookie = f"{PLAIN_COOKIE}={token}"
    return session.id, {"authorization": "", "cookie": cookie, CSRF_HEADER: session.csrf_token}


async def people(api: ApiApp) -> tuple[Member, Member, Member]:
    """Alice (owner), Vera (viewer), and Bob, a member of no tenant."""
    create = api.services.members.create
    return (
        await create("alice@example.com", PASSWORD, "owner"),
        await create("vera@example.com", PASSWORD, "viewer"),
        await create("bob@example.com", PASSWORD, "member"),
    )


async def test_members_see_their_own_sessions_with_the_current_one_marked(api: ApiApp) -> None:
    for member in await people(api):
        (first, _), (second, headers) = await browser(api, member), await browser(api, member)

        listed = await api.call("GET", "/sessions", headers=headers)

        assert [(row["id"], row["current"]) for row in listed["data"]] == [(second, True), (first, False)]
        row = listed["data"][0]
        assert (row["email"], row["device"], row["address"]) == (member.email, "Firefox on Linux", "192.0.2.7")
        assert row["method"] == "password+totp"
        assert row["created_at"] <= row["last_seen_at"] < row["expires_at"]
        assert not {"token", "token_hash", "csrf_token"} & row.keys()


async def test_owners_and_owner_tokens_see_sessions_of_others(api: ApiApp) -> None:
    alice, vera, _ = await people(api)
    (session, _), (_, owner) = await browser(api, vera), await browser(api, alice)

    listed = await api.call("GET", "/sessions", params={"member_id": vera.id}, headers=owner)
    everything = await api.call("GET", "/sessions", params={"limit": 1})

    assert [row["id"] for row in listed["data"]] == [session]
    assert everything["has_more"]
    rest = await api.call("GET", "/sessions", params={"cursor": everything["next_cursor"]})
    assert [row["id"] for row in rest["data"]] == [session]


async def test_other_roles_cannot_see_or_end_sessions_of_others(api: ApiApp) -> None:
    alice, vera, bob = await people(api)
    session, owner = await browser(api, alice)
    for member, status in ((vera, 403), (bob, 404)):
        _, headers = await browser(api, member)
        await api.call("GET", "/sessions", params={"member_id": alice.id}, headers=headers, status=status)
        await api.call("DELETE", "/sessions", params={"member_id": alice.id}, headers=headers, status=status)
        await api.call("DELETE", f"/sessions/{session}", headers=headers, status=404)
    for role in ("admin", "billing", "viewer"):
        headers = await api.as_role(role)
        await api.call("GET", "/sessions", headers=headers, status=403)
        await api.call("DELETE", f"/sessions/{session}", headers=headers, status=403)
    await api.call("GET", "/sessions", headers=owner)


async def test_an_ended_session_is_refused_at_once(api: ApiApp) -> None:
    alice, vera, _ = await people(api)
    (session, headers), (_, owner) = await browser(api, vera), await browser(api, alice)

    assert await api.call("DELETE", f"/sessions/{session}", headers=owner) == {"ended": 1}

    await api.call("GET", "/sessions", headers=headers, status=401)
    await api.call("DELETE", f"/sessions/{session}", headers=owner, status=404)


async def test_ending_all_other_sessions_keeps_the_current_one(api: ApiApp) -> None:
    _, vera, _ = await people(api)
    await browser(api, vera)
    kept, headers = await browser(api, vera)

    assert await api.call("DELETE", "/sessions", headers=headers) == {"ended": 1}
    assert [row["id"] for row in (await api.call("GET", "/sessions", headers=headers))["data"]] == [kept]
    assert await api.call("DELETE", "/sessions", params={"member_id": vera.id}) == {"ended": 1}
    answer = await api.call("DELETE", "/sessions", status=400)
    assert answer["error"]["param"] == "member_id"


async def test_a_cross_site_request_cannot_end_sessions(api: ApiApp) -> None:
    _, vera, _ = await people(api)
    session, headers = await browser(api, vera)

    for wrong in ({CSRF_HEADER: "forged"}, {"sec-fetch-site": "cross-site"}, {"origin": "http://evil.test"}):
        await api.call("DELETE", f"/sessions/{session}", headers={**headers, **wrong}, status=403)


async def test_only_an_owner_can_reset_a_second_factor(api: ApiApp) -> None:
    _, vera, _ = await people(api)
    factors = api.services.second_factors
    enrolment = factors.begin(vera)
    await factors.enable(vera, enrolment, pyotp.TOTP(enrolment.secret).now())
    _, headers = await browser(api, vera)
    path = f"/members/{vera.id}/second-factor"

    before = await api.call("GET", path)
    await api.call("DELETE", path, headers=await api.as_role("admin"), status=403)
    await api.call("DELETE", path, headers=headers, status=403)
    after = await api.call("DELETE", path)

    assert (before["enabled"], before["recovery_codes_left"]) == (True, 10)
    assert after == {"member_id": vera.id, "enabled": False, "enabled_at": None, "recovery_codes_left": 0}
    assert await factors.challenge(vera.id) is None
    await api.call("GET", "/sessions", headers=headers, status=401)
    await api.call("DELETE", "/members/mb_nobody/second-factor", status=404)


async def test_only_an_owner_can_unlink_a_member_from_the_provider(api: ApiApp) -> None:
    _, vera, _ = await people(api)
    linked = Identity(issuer="https://id.example.com", subject="1", email="vera@example.com")
    await api.services.identities.member_of(linked)
    path = f"/members/{vera.id}/provider"

    await api.call("DELETE", path, headers=await api.as_role("admin"), status=403)
    assert await api.call("DELETE", path) == {"member_id": vera.id, "issuer": None}
    await api.call("DELETE", "/members/mb_nobody/provider", status=404)


async def test_an_invalid_host_header_is_not_a_server_error(api: ApiApp) -> None:
    answer = await api.client.get("/admin/v1/me", headers={"host": "a:b:c", "authorization": ""})

    assert answer.status_code == 401
