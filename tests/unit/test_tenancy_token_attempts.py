"""Guessing of administrator tokens is rate-limited per address and locks out nobody with a valid token."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from sqlalchemy.exc import OperationalError

from appliance.base.db import Database
from appliance.base.errors import InvalidApiKey, RateLimitExceeded
from appliance.tenancy import token_attempts
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.attempts import AttemptRate, Attempts
from appliance.tenancy.networks import client_network
from appliance.tenancy.token_attempts import PER_ADDRESS
from tests.support.api_app import ApiApp
from tests.support.clock import FakeClock

STRANGER, ALICE = "192.0.2.7", "192.0.2.9"
pytestmark = pytest.mark.on_either_database


@pytest.fixture
def tokens(database: Database, clock: FakeClock) -> AdminTokens:
    return AdminTokens(database, clock)


async def _guess(tokens: AdminTokens, count: int, address: str = STRANGER) -> None:
    for number in range(count):
        with pytest.raises(InvalidApiKey):
            await tokens.authenticate(f"gha_guess{number}", address)


async def test_after_too_many_wrong_tokens_an_address_is_refused_without_a_lookup(
    tokens: AdminTokens, clock: FakeClock
) -> None:
    await _guess(tokens, PER_ADDRESS.burst)
    with pytest.raises(RateLimitExceeded) as refused:
        await tokens.authenticate("gha_another", STRANGER)
    assert refused.value.retry_after_s == pytest.approx(PER_ADDRESS.refill_s)

    _, secret = await tokens.create("alice", "owner")
    with pytest.raises(RateLimitExceeded):
        await tokens.authenticate(secret, STRANGER)
    assert (await tokens.authenticate(secret, ALICE)).name == "alice"

    clock.advance(PER_ADDRESS.refill_s)
    await _guess(tokens, 1)
    with pytest.raises(RateLimitExceeded):
        await tokens.authenticate("gha_another", STRANGER)


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:0:1::7", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:8000::9", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_attempts_are_counted_by_ipv4_address_or_by_the_64_bits_of_an_ipv6_network(address: str, network: str) -> None:
    assert client_network(address) == network


async def test_a_valid_token_uses_up_no_attempts(tokens: AdminTokens) -> None:
    _, secret = await tokens.create("alice", "owner")
    for _ in range(PER_ADDRESS.burst + 10):
        await tokens.authenticate(secret, ALICE)
    await _guess(tokens, PER_ADDRESS.burst, ALICE)


async def test_concurrent_first_uses_of_a_valid_token_are_all_accepted(tokens: AdminTokens) -> None:
    """As a program with many connections does right after the gateway has restarted."""
    _, secret = await tokens.create("alice", "owner")
    used = await asyncio.gather(*(tokens.authenticate(secret, ALICE) for _ in range(PER_ADDRESS.burst + 50)))
    assert {token.name for token in used} == {"alice"}
    await _guess(tokens, PER_ADDRESS.burst, ALICE)


async def test_concurrent_uses_of_a_wrong_token_are_limited_too(tokens: AdminTokens) -> None:
    tries = (tokens.authenticate("gha_guess", STRANGER) for _ in range(PER_ADDRESS.burst + 50))
    answers = Counter(type(answer) for answer in await asyncio.gather(*tries, return_exceptions=True))
    assert (answers[InvalidApiKey], answers[RateLimitExceeded]) == (PER_ADDRESS.burst, 50)
    assert not tokens._attempts._lookups


async def test_a_client_cancelled_during_the_lookup_does_not_block_others(tokens: AdminTokens) -> None:
    _, secret = await tokens.create("alice", "owner")
    tries = [asyncio.create_task(tokens.authenticate(secret, ALICE)) for _ in range(3)]
    await asyncio.sleep(0)
    for left in tries[:2]:
        left.cancel()
    assert (await asyncio.wait_for(tries[2], 60)).name == "alice"


async def test_a_known_token_is_accepted_from_a_blocked_address(tokens: AdminTokens) -> None:
    known, secret = await tokens.create("alice", "owner")
    await tokens.authenticate(secret, STRANGER)
    await _guess(tokens, PER_ADDRESS.burst)
    assert (await tokens.authenticate(secret, STRANGER)).id == known.id

    await tokens.revoke(known.id)
    with pytest.raises(InvalidApiKey):
        await tokens.authenticate(secret, STRANGER)
    with pytest.raises(RateLimitExceeded):
        await tokens.authenticate(secret, STRANGER)


async def test_a_database_error_does_not_count_as_a_wrong_token(tokens: AdminTokens, monkeypatch: pytest.MonkeyPatch) -> None:
    _, secret = await tokens.create("alice", "owner")

    def fail() -> None:
        raise OperationalError("SELECT", {}, Exception("no server answers"))

    with monkeypatch.context() as outage:
        outage.setattr(tokens._db, "reading", fail)
        for _ in range(PER_ADDRESS.burst + 1):
            with pytest.raises(OperationalError):
                await tokens.authenticate(secret, ALICE)
    assert (await tokens.authenticate(secret, ALICE)).name == "alice"
    await _guess(tokens, PER_ADDRESS.burst, ALICE)


async def test_an_ipv6_site_counts_as_one_address_and_memory_is_bounded(
    tokens: AdminTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(PER_ADDRESS.burst):
        await _guess(tokens, 1, f"2001:db8::{number + 1:x}")
    with pytest.raises(RateLimitExceeded):
        await tokens.authenticate("gha_another", "2001:db8::ffff")

    monkeypatch.setattr(token_attempts, "ADDRESSES_MAX", 3)
    monkeypatch.setattr(token_attempts, "KNOWN_MAX", 3)
    tokens = AdminTokens(tokens._db, tokens._clock)
    for number in range(10):
        _, secret = await tokens.create(f"token {number}", "viewer")
        await tokens.authenticate(secret, f"198.51.100.{number}")
    assert len(tokens._attempts._attempts) == len(tokens._attempts._known) == 3


@pytest.mark.parametrize("path", ["/admin/v1/tenants", "/v1/organization/projects"])
async def test_the_refusal_has_a_retry_after_header(api: ApiApp, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_attempts, "PER_ADDRESS", AttemptRate(burst=3, refill_s=86400.0))
    wrong = {"authorization": "Bearer gha_wrong"}
    answers = [await api.client.get(path, headers=wrong) for _ in range(4)]

    assert [answer.status_code for answer in answers] == [401, 401, 401, 429]
    assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"
    assert 86000 < int(answers[-1].headers["retry-after"]) <= 86400
    assert (await api.client.get(path)).status_code == 200, "the operator on this machine is accepted"


def test_the_least_recently_used_key_of_attempts_is_forgotten_first(clock: FakeClock) -> None:
    attempts, twice = Attempts[str](clock, keys_max=2, refusal="too many"), AttemptRate(burst=2, refill_s=60.0)
    for key in ("a", "b", "b", "a"):
        attempts.take({key: twice})
    attempts.take({"c": twice})  # b is forgotten
    with pytest.raises(RateLimitExceeded, match="too many"):
        attempts.take({"a": twice})
    attempts.take({"c": twice})
    with pytest.raises(RateLimitExceeded):
        attempts.take({"c": twice})
    assert len(attempts) == 2


def test_refunding_a_forgotten_key_does_nothing(clock: FakeClock) -> None:
    attempts, once = Attempts[str](clock, keys_max=1, refusal="too many"), AttemptRate(burst=1, refill_s=60.0)
    attempts.take({"a": once})
    attempts.take({"b": once})  # a is forgotten
    attempts.refund("a", once)
    assert len(attempts) == 1
    attempts.refund("b", once)
    attempts.take({"b": once})


async def test_the_least_recently_used_valid_token_is_forgotten_first(
    tokens: AdminTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_attempts, "KNOWN_MAX", 2)
    first, second, third = [(await tokens.create(name, "owner"))[1] for name in ("alice", "bob", "charlie")]
    for secret in (first, second, first, third):  # the second is forgotten
        await tokens.authenticate(secret, ALICE)
    await _guess(tokens, PER_ADDRESS.burst, ALICE)
    for secret in (first, third):
        await tokens.authenticate(secret, ALICE)
    with pytest.raises(RateLimitExceeded):
        await tokens.authenticate(second, ALICE)
