"""The first start creates an owner, a token and a key once, even if it was interrupted; the pepper is kept."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from appliance.base.db import Database
from appliance.base.errors import InvalidApiKey, InvalidCredentials
from appliance.base.settings import Settings, UnusableData
from appliance.tenancy.admin_tokens import AdminTokens
from appliance.tenancy.bootstrap import FirstStart, bootstrap
from appliance.tenancy.first_login import PENDING_FILE, mark_shown
from appliance.tenancy.keys import Keys
from appliance.tenancy.members import Members
from appliance.tenancy.secrets import read_or_create_pepper
from appliance.tenancy.tenants import Tenants
from tests.support.cast import OWNER, PEPPER
from tests.support.clock import FakeClock


async def start(database: Database, clock: FakeClock, settings: Settings) -> FirstStart | None:
    return await bootstrap(
        settings,
        Members(database, clock),
        AdminTokens(database, clock),
        Tenants(database, clock),
        Keys(database, clock, PEPPER),
    )


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_dir=tmp_path, database_url="sqlite:///unused")


async def test_the_first_start_returns_secrets_that_work(database: Database, clock: FakeClock, settings: Settings) -> None:
    first = await start(database, clock, settings)
    assert first is not None
    assert first.email == "admin@localhost"
    assert first.password is not None
    assert first.admin_token is not None
    member = (await Members(database, clock).prove_password(first.email, first.password)).member
    assert member.role == "owner"
    assert (await AdminTokens(database, clock).authenticate(first.admin_token)).role == "owner"
    principal = await Keys(database, clock, PEPPER).authenticate(first.api_key, "127.0.0.1")
    assert (principal.tenant.name, principal.key.name) == ("demo", "first key")
    for secret in (first.password, first.admin_token, first.api_key):
        assert secret not in repr(first)


async def test_a_later_start_creates_nothing(database: Database, clock: FakeClock, settings: Settings) -> None:
    await start(database, clock, settings)
    mark_shown(settings.data_dir)
    assert await start(database, clock, settings) is None
    assert len((await Tenants(database, clock).list(access=OWNER)).data) == 1


async def test_credentials_set_by_the_operator_are_used_and_not_shown(
    database: Database, clock: FakeClock, tmp_path: Path
) -> None:
    settings = Settings(
        data_dir=tmp_path,
        database_url="sqlite:///unused",
        admin_email="alice@example.com",
        admin_password="alice's password",
        admin_token="alice's token",
    )
    first = await start(database, clock, settings)
    assert first is not None
    assert (first.email, first.password, first.admin_token) == ("alice@example.com", None, None)
    await Members(database, clock).prove_password("alice@example.com", "alice's password")
    await AdminTokens(database, clock).authenticate("alice's token")


async def test_an_interrupted_first_start_is_repeated(
    database: Database, clock: FakeClock, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Members, "create", killed)
        with pytest.raises(KeyboardInterrupt):
            await start(database, clock, settings)
    first = await start(database, clock, settings)
    assert first is not None
    await Keys(database, clock, PEPPER).authenticate(first.api_key, "127.0.0.1")


async def test_secrets_that_were_not_shown_are_replaced_at_the_next_start(
    database: Database, clock: FakeClock, settings: Settings
) -> None:
    unseen = await start(database, clock, settings)
    shown = await start(database, clock, settings)
    assert unseen is not None
    assert shown is not None
    assert unseen.password is not None
    assert shown.password is not None
    assert unseen.admin_token is not None
    assert shown.admin_token is not None
    members, tokens = Members(database, clock), AdminTokens(database, clock)
    await members.prove_password(shown.email, shown.password)
    await tokens.authenticate(shown.admin_token)
    await Keys(database, clock, PEPPER).authenticate(shown.api_key, "127.0.0.1")
    with pytest.raises(InvalidCredentials):
        await members.prove_password(unseen.email, unseen.password)
    with pytest.raises(InvalidApiKey):
        await tokens.authenticate(unseen.admin_token)
    with pytest.raises(InvalidApiKey):
        await Keys(database, clock, PEPPER).authenticate(unseen.api_key, "127.0.0.1")
    mark_shown(settings.data_dir)
    assert await start(database, clock, settings) is None


async def test_the_file_of_a_pending_login_is_private_and_has_no_secret(
    database: Database, clock: FakeClock, settings: Settings
) -> None:
    first = await start(database, clock, settings)
    assert first is not None
    path = settings.data_dir / PENDING_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not any(str(secret) in path.read_text() for secret in (first.password, first.admin_token, first.api_key))


async def test_a_pending_login_of_another_database_is_ignored(database: Database, clock: FakeClock, settings: Settings) -> None:
    first = await start(database, clock, settings)
    assert first is not None
    pending = '{"email": "admin@localhost", "key_id": "key_elsewhere", "token_id": null}'
    (settings.data_dir / PENDING_FILE).write_text(pending)
    assert await start(database, clock, settings) is None
    assert (settings.data_dir / PENDING_FILE).read_text() == pending


async def test_a_damaged_file_of_a_pending_login_stops_the_start(
    database: Database, clock: FakeClock, settings: Settings
) -> None:
    (settings.data_dir / PENDING_FILE).write_text("{")
    with pytest.raises(UnusableData, match="reset-password"):
        await start(database, clock, settings)


def test_the_pepper_is_created_once_with_private_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    pepper = read_or_create_pepper(folder)
    assert len(pepper) == 32
    assert read_or_create_pepper(folder) == pepper
    assert stat.S_IMODE((folder / "secret.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["secret.key"]


def test_a_damaged_pepper_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "secret.key").write_bytes(b"short")
    with pytest.raises(UnusableData, match="backup"):
        read_or_create_pepper(tmp_path)
