"""The current status of keys whose requests are running."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.tenancy import key_status
from appliance.tenancy.key_status import end_cause, read_principals
from tests.support.cast import Cast, Person, make_person
from tests.support.clock import FakeClock


async def test_principals_of_any_number_of_keys_are_read(
    database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_status, "KEYS_PER_QUERY", 2)
    people: list[Person] = [cast.charlie, *[await make_person(database, clock, name) for name in ("dora", "erin", "frank")]]

    found = await read_principals(database, {*(person.key.id for person in people), "key_of_nobody"})

    assert found == {person.key.id: person.principal for person in people}
    assert await read_principals(database, ()) == {}


async def test_a_running_request_ends_when_its_key_or_tenant_becomes_unusable(cast: Cast, clock: FakeClock) -> None:
    now, person = clock.now(), cast.bob.principal
    later, earlier = now + timedelta(microseconds=1), now - timedelta(days=1)
    key_changes: list[tuple[dict[str, Any], str | None]] = [
        ({"expires_at": later}, None),
        ({"expires_at": now}, "key_expired"),
        ({"expires_at": earlier}, "key_expired"),
        ({"revoked_at": now}, "key_revoked"),
    ]
    for changes, cause in key_changes:
        assert end_cause(dataclasses.replace(person, key=dataclasses.replace(person.key, **changes)), now) == cause
    suspended, archived = dataclasses.replace(person.tenant, suspended=True), dataclasses.replace(person.tenant, archived=True)
    for tenant, cause in ((suspended, "tenant_suspended"), (archived, "tenant_archived"), (person.tenant, None)):
        assert end_cause(dataclasses.replace(person, tenant=tenant), now) == cause
    assert end_cause(None, now) == "key_revoked"
