"""The second factor: codes valid once, recovery codes, and the sessions and secrets that each change revokes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime

import pyotp
import pytest
from sqlalchemy import select, update

from appliance.base.db import Database
from appliance.base.errors import Conflict, InvalidCredentials, NotFound, SecretUnreadable
from appliance.base.tables import audit_log, members, recovery_codes
from appliance.tenancy.members import Members
from appliance.tenancy.recovery_codes import NUM_CODES
from appliance.tenancy.second_factor import (
    ENROLMENT_LIFE_S,
    STEP_S,
    Enrolment,
    SecondFactors,
    _is_code_of,
    appliance_label,
    reset_by_email,
)
from appliance.tenancy.sessions import Sessions
from tests.support.cast import ALICE_PASSWORD, PEPPER, Cast
from tests.support.clock import FakeClock


@pytest.fixture
def factors(database: Database, clock: FakeClock) -> SecondFactors:
    return SecondFactors(database, clock, PEPPER)


def code_at(enrolment: Enrolment, clock: FakeClock, steps: int = 0) -> str:
    """The code that the app shows now, or some steps from now."""
    return pyotp.TOTP(enrolment.secret).at(clock.now(), counter_offset=steps)


async def enrolled(factors: SecondFactors, cast: Cast, clock: FakeClock) -> tuple[Enrolment, list[str]]:
    """Alice's second factor, one step after it was confirmed."""
    enrolment = factors.begin(cast.alice)
    codes = await factors.enable(cast.alice, enrolment, code_at(enrolment, clock))
    clock.advance(STEP_S)
    return enrolment, codes


@pytest.mark.parametrize(
    ("at", "code"),
    [(59, "287082"), (1111111109, "081804"), (1111111111, "050471"), (1234567890, "005924"), (2000000000, "279037")],
)
def test_codes_match_the_test_vectors_of_rfc_6238(at: int, code: str) -> None:
    secret = "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ"  # appendix B: the ASCII text 12345678901234567890; six of its eight digits
    assert _is_code_of(secret, int(datetime.fromtimestamp(at, UTC).timestamp()) // STEP_S, code)


async def test_a_second_factor_is_enabled_only_by_a_valid_code(factors: SecondFactors, cast: Cast, clock: FakeClock) -> None:
    enrolment = factors.begin(cast.alice)

    with pytest.raises(InvalidCredentials):
        await factors.enable(cast.alice, enrolment, code_at(enrolment, clock, steps=5))

    assert await factors.challenge(cast.alice.id) is None
    await factors.enable(cast.alice, enrolment, code_at(enrolment, clock))
    assert await factors.challenge(cast.alice.id) is not None
    assert (await factors.state(cast.alice.id)).enabled_at == clock.now()


@pytest.mark.parametrize("steps", [-1, 0, 1])
async def test_a_code_of_the_previous_or_next_step_is_accepted(
    factors: SecondFactors, cast: Cast, clock: FakeClock, steps: int
) -> None:
    enrolment, _ = await enrolled(factors, cast, clock)
    clock.advance(STEP_S)

    assert await factors.check(cast.alice.id, code_at(enrolment, clock, steps)) == "totp"


@pytest.mark.parametrize("steps", [-2, 2])
async def test_a_code_two_steps_away_is_refused(factors: SecondFactors, cast: Cast, clock: FakeClock, steps: int) -> None:
    enrolment, _ = await enrolled(factors, cast, clock)
    clock.advance(5 * STEP_S)

    with pytest.raises(InvalidCredentials):
        await factors.check(cast.alice.id, code_at(enrolment, clock, steps))


async def test_the_second_factor_of_one_member_does_not_affect_others(
    database: Database, factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    people = Members(database, clock)
    dora, emil = [await people.create(f"{name}@example.com", "long enough", "viewer") for name in ("dora", "emil")]
    session_store, member_ids = Sessions(database, clock), [cast.alice.id, dora.id, emil.id]
    alices, _ = await enrolled(factors, cast, clock)
    token, _ = await session_store.open(cast.alice.id, "browser", "127.0.0.1")
    doras = factors.begin(dora)
    await factors.enable(dora, doras, code_at(doras, clock))
    assert await factors.enabled_of(member_ids) == {cast.alice.id, dora.id}
    assert await factors.enabled_of([dora.id, emil.id]) == {dora.id}
    assert [(await factors.state(member_id)).recovery_codes_left for member_id in member_ids] == [NUM_CODES, NUM_CODES, 0]
    clock.advance(STEP_S)
    assert await factors.check(dora.id, code_at(doras, clock)) == "totp"
    assert await factors.check(cast.alice.id, code_at(alices, clock)) == "totp"
    await factors.disable(dora.id)
    assert await factors.enabled_of(member_ids) == {cast.alice.id}
    assert [(await factors.state(member_id)).recovery_codes_left for member_id in member_ids] == [NUM_CODES, 0, 0]
    assert await session_store.resolve(token) is not None


async def test_a_proof_of_the_second_factor_is_invalid_once_the_member_is_disabled(
    database: Database, factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    await enrolled(factors, cast, clock)
    stamp = await factors.challenge(cast.alice.id)
    query = select(members).where(members.c.id == cast.alice.id)
    is_valid = []
    for disabled_at in (None, clock.now()):
        async with database.writing() as connection:
            await connection.execute(update(members).values(disabled_at=disabled_at))
            row = (await connection.execute(query)).mappings().one()
        is_valid.append(factors.proof_of(stamp or "")(row))
    assert is_valid == [True, False]


async def test_a_used_code_and_those_before_it_are_refused(factors: SecondFactors, cast: Cast, clock: FakeClock) -> None:
    enrolment, _ = await enrolled(factors, cast, clock)
    code = code_at(enrolment, clock)

    await factors.check(cast.alice.id, f" {code[:3]} {code[3:]} ")
    for used in (code, code_at(enrolment, clock, steps=-1)):
        with pytest.raises(InvalidCredentials):
            await factors.check(cast.alice.id, used)


async def test_the_code_that_enabled_the_second_factor_cannot_sign_in(
    factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    enrolment = factors.begin(cast.alice)
    code = code_at(enrolment, clock)
    await factors.enable(cast.alice, enrolment, code)

    with pytest.raises(InvalidCredentials):
        await factors.check(cast.alice.id, code)


async def test_a_code_sent_concurrently_is_accepted_once(factors: SecondFactors, cast: Cast, clock: FakeClock) -> None:
    enrolment, recovery = await enrolled(factors, cast, clock)
    for code in (code_at(enrolment, clock), recovery[0]):
        answers = await asyncio.gather(*(factors.check(cast.alice.id, code) for _ in range(8)), return_exceptions=True)

        assert sorted(isinstance(answer, InvalidCredentials) for answer in answers) == [False, *[True] * 7]


FULL_WIDTH = str.maketrans("0123456789", "０１２３４５６７８９")
SPOILED: dict[str, Callable[[str], str]] = {
    "empty": lambda _code: "",
    "a digit less": lambda code: code[:-1],
    "a digit more": lambda code: f"{code}0",
    "digits of another script": lambda code: code.translate(FULL_WIDTH),
    "a letter more": lambda code: f"{code}x",
    "long": lambda code: code * 1000,
    "a control character": lambda _code: "\x00",
    "half of a surrogate pair": lambda _code: "\ud800",
    "the form of a recovery code": lambda _code: "abcde-fghjk",
}


@pytest.mark.parametrize("name", SPOILED)
async def test_a_valid_code_is_refused_in_another_form(factors: SecondFactors, cast: Cast, clock: FakeClock, name: str) -> None:
    enrolment, _ = await enrolled(factors, cast, clock)

    with pytest.raises(InvalidCredentials, match=r"^the code is wrong, or was used already$"):
        await factors.check(cast.alice.id, SPOILED[name](code_at(enrolment, clock)))


async def test_a_wrong_code_is_refused_with_the_same_message(factors: SecondFactors, cast: Cast, clock: FakeClock) -> None:
    enrolment, _ = await enrolled(factors, cast, clock)
    valid = {code_at(enrolment, clock, steps) for steps in (-1, 0, 1)}
    wrong = next(code for code in ("000000", "000001", "000002", "000003") if code not in valid)

    with pytest.raises(InvalidCredentials, match=r"^the code is wrong, or was used already$"):
        await factors.check(cast.alice.id, wrong)


async def test_a_code_for_a_member_without_a_second_factor_is_refused(factors: SecondFactors, cast: Cast) -> None:
    with pytest.raises(InvalidCredentials):
        await factors.check(cast.alice.id, "123456")


async def test_a_disabled_member_cannot_use_a_code(
    database: Database, factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    enrolment, recovery = await enrolled(factors, cast, clock)
    async with database.writing() as connection:
        await connection.execute(update(members).values(disabled_at=clock.now()))

    for code in (code_at(enrolment, clock), recovery[0]):
        with pytest.raises(InvalidCredentials):
            await factors.check(cast.alice.id, code)


async def test_a_changed_password_invalidates_the_stamp_of_the_first_factor(
    database: Database, factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    enrolment, _ = await enrolled(factors, cast, clock)
    stamp = await factors.challenge(cast.alice.id)
    async with database.writing() as connection:
        await connection.execute(update(members).values(password_hash="$argon2id$another"))

    with pytest.raises(InvalidCredentials):
        await factors.check(cast.alice.id, code_at(enrolment, clock), stamp=stamp)
    await factors.check(cast.alice.id, code_at(enrolment, clock), stamp=await factors.challenge(cast.alice.id))


async def test_the_stamp_of_the_first_factor_ends_with_the_second_factor(
    factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    await enrolled(factors, cast, clock)
    stamp = await factors.challenge(cast.alice.id)
    await factors.disable(cast.alice.id)
    enrolment, _ = await enrolled(factors, cast, clock)

    with pytest.raises(InvalidCredentials):
        await factors.check(cast.alice.id, code_at(enrolment, clock), stamp=stamp)
    await factors.check(cast.alice.id, code_at(enrolment, clock), stamp=await factors.challenge(cast.alice.id))


async def test_a_recovery_code_is_accepted_once_in_any_spelling(factors: SecondFactors, cast: Cast, clock: FakeClock) -> None:
    _, recovery = await enrolled(factors, cast, clock)

    assert len(set(recovery)) == NUM_CODES
    assert await factors.check(cast.alice.id, recovery[3].upper().replace("-", " ")) == "recovery"
    assert (await factors.state(cast.alice.id)).recovery_codes_left == NUM_CODES - 1
    with pytest.raises(InvalidCredentials):
        await factors.check(cast.alice.id, recovery[3])


async def test_new_recovery_codes_replace_the_old_ones(factors: SecondFactors, cast: Cast, clock: FakeClock) -> None:
    _, old = await enrolled(factors, cast, clock)

    new = await factors.renew_recovery_codes(cast.alice.id)

    with pytest.raises(InvalidCredentials):
        await factors.check(cast.alice.id, old[0])
    assert await factors.check(cast.alice.id, new[0]) == "recovery"


async def test_recovery_codes_require_a_second_factor(factors: SecondFactors, cast: Cast) -> None:
    with pytest.raises(Conflict) as refused:
        await factors.renew_recovery_codes(cast.alice.id)
    assert refused.value.code == "conflict"


async def test_secret_and_codes_are_not_readable_in_the_database(
    database: Database, factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    enrolment, recovery = await enrolled(factors, cast, clock)
    async with database.reading() as connection:
        member = (await connection.execute(select(members))).one()
        digests = [row.digest for row in await connection.execute(select(recovery_codes))]
        log = str((await connection.execute(select(audit_log))).all())

    assert enrolment.secret not in str(member)
    assert len(digests) == NUM_CODES
    assert not any(code.replace("-", "") in text for code in recovery for text in (*digests, log))
    assert enrolment.secret not in log


async def test_with_another_secret_key_the_error_names_the_key_file(
    database: Database, factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    enrolment, recovery = await enrolled(factors, cast, clock)
    elsewhere = SecondFactors(database, clock, b"q" * 32)
    for code in (code_at(enrolment, clock), "000000", recovery[0]):
        with pytest.raises(SecretUnreadable, match=r"secret\.key .* restore that file from a backup"):
            await elsewhere.check(cast.alice.id, code)
    assert await factors.check(cast.alice.id, recovery[0]) == "recovery", "no recovery code was used up"


async def test_a_second_enrolment_does_not_replace_the_first(factors: SecondFactors, cast: Cast, clock: FakeClock) -> None:
    first, _ = await enrolled(factors, cast, clock)
    second = factors.begin(cast.alice)

    with pytest.raises(Conflict):
        await factors.enable(cast.alice, second, code_at(second, clock))

    assert await factors.check(cast.alice.id, code_at(first, clock)) == "totp"


async def test_an_enrolment_belongs_to_one_member_and_expires(factors: SecondFactors, cast: Cast, clock: FakeClock) -> None:
    enrolment = factors.begin(cast.alice)
    assert factors.resume(cast.alice, enrolment.ticket) == enrolment

    charlie = dataclasses.replace(cast.alice, id="mb_charlie")
    assert factors.resume(charlie, enrolment.ticket) is None
    assert factors.resume(cast.alice, enrolment.ticket[:-4] + "AAAA") is None
    assert factors.resume(cast.alice, "") is None
    clock.advance(ENROLMENT_LIFE_S)
    assert factors.resume(cast.alice, enrolment.ticket) is None


async def test_enabling_or_disabling_ends_all_sessions(
    database: Database, factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    session_store = Sessions(database, clock)
    enrolment = factors.begin(cast.alice)
    before, _ = await session_store.open(cast.alice.id, "test", "192.0.2.1")
    await factors.enable(cast.alice, enrolment, code_at(enrolment, clock))
    after, _ = await session_store.open(cast.alice.id, "test", "192.0.2.1")
    await factors.disable(cast.alice.id)

    assert await session_store.resolve(before) is None
    assert await session_store.resolve(after) is None


async def test_disabling_or_resetting_deletes_secret_and_recovery_codes(
    database: Database, factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    for remove in (factors.disable, factors.reset):
        await enrolled(factors, cast, clock)
        await remove(cast.alice.id)

        assert await factors.challenge(cast.alice.id) is None
        async with database.reading() as connection:
            assert (await connection.execute(select(members.c.totp_secret))).scalar_one() is None
            assert (await connection.execute(select(recovery_codes))).first() is None
    await enrolled(factors, cast, clock)
    assert (await reset_by_email(database, clock, " Alice@Example.com ")).id == cast.alice.id
    assert await factors.challenge(cast.alice.id) is None
    with pytest.raises(NotFound):
        await reset_by_email(database, clock, "nobody@example.com")


async def test_changes_and_used_recovery_codes_are_audited(
    database: Database, factors: SecondFactors, cast: Cast, clock: FakeClock
) -> None:
    _, recovery = await enrolled(factors, cast, clock)
    await factors.check(cast.alice.id, recovery[0])
    await factors.renew_recovery_codes(cast.alice.id)
    await factors.disable(cast.alice.id)
    await factors.reset(cast.alice.id)  # nothing left to reset: no entry
    async with database.reading() as connection:
        query = select(audit_log.c.action).where(audit_log.c.target_id == cast.alice.id).order_by(audit_log.c.id)
        actions = [row.action for row in await connection.execute(query) if row.action.startswith("second_factor.")]

    verbs = ["enable", "use_recovery_code", "renew_codes", "disable"]
    assert actions == [f"second_factor.{verb}" for verb in verbs]


def test_the_label_in_the_app_names_the_appliance() -> None:
    assert appliance_label("https://llm.example.com:8443/x") == "Gatehouse llm.example.com"
    assert appliance_label(None) == "Gatehouse"


async def test_the_uri_in_the_qr_code_has_secret_account_and_issuer(database: Database, clock: FakeClock, cast: Cast) -> None:
    enrolment = SecondFactors(database, clock, PEPPER, label="Gatehouse llm.example.com").begin(cast.alice)

    read = pyotp.parse_uri(enrolment.uri)
    assert (read.secret, read.name, read.issuer) == (enrolment.secret, cast.alice.email, "Gatehouse llm.example.com")
    assert len(enrolment.secret) == 32  # 160 bits, as RFC 4226 asks for
    assert ALICE_PASSWORD not in enrolment.uri
