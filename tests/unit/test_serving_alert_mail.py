"""Alerts by e-mail: content, both kinds of TLS, authentication, and mail servers that refuse or hang."""

from __future__ import annotations

import asyncio
import dataclasses
import smtplib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from aiosmtpd.smtp import SMTP, AuthResult, Envelope

from appliance.base.db import Database
from appliance.base.settings import load_settings
from appliance.metering.alerts.outbox import EVENTS, Delivery
from appliance.metering.alerts.send_limits import TEST_EVENT
from appliance.metering.alerts.webhooks import Endpoint
from appliance.metering.calendar import BillingCalendar
from appliance.serving.alerting import watch
from appliance.serving.alerting.alerts import Alerts
from appliance.serving.alerting.delivery import SendFailed
from appliance.serving.alerting.mail import MailSender
from appliance.serving.alerting.texts import text_of
from appliance.serving.model_registry import ModelRegistry
from appliance.serving.readiness import Readiness
from appliance.telemetry.metrics import Metrics
from appliance.tenancy.keys import Keys
from appliance.tenancy.principals import KeyChanges
from tests.support.alerts import receiving
from tests.support.cast import OWNER, PEPPER, Cast
from tests.support.certificates import Certificate, make_certificate
from tests.support.clock import START, FakeClock
from tests.support.polling import poll_until

TENANT = {"tenant_id": "tn_1", "tenant_name": "Bob & <Söhne>"}
DATA: dict[str, dict[str, Any]] = {
    "budget.threshold": {
        **TENANT,
        "percent": 80,
        "month": "2026-11",
        "monthly_budget": 100_000_000,
        "spent_picos": 81_234_567_890_123,
        "currency": "EUR",
    },
    "tokens_per_day.threshold": {**TENANT, "percent": 100, "day": "2026-11-21", "tokens_per_day": 1000, "tokens": 1001},
    "invoice.closed": {
        **TENANT,
        "invoice_id": "inv_1",
        "number": "2026-0007",
        "month": "2026-10",
        "total_micros": 1_500_000,
        "currency": "EUR",
    },
    "key.expiring": {**TENANT, "key_name": "ci", "prefix": "gh_aaaaaaaa", "expires_at": "2026-11-25T00:00:00.000Z"},
    "engine.down": {"model": "demo", "state": "failed", "down_s": 61, "error": None},
    "engine.gpu_unused": {"model": "demo", "reason": "torch finds no usable GPU. Too old."},
    "engine.kernels_refused": {"model": "demo", "kernels": ["products by GEMV: wrong results", "attention by parts: timeout"]},
    TEST_EVENT: {"webhook_id": "wh_1", "note": "a test"},
}
MAILBOX = Endpoint(id="wh_1", kind="email", target="ops@example.com", secrets=())


def delivery(event: str = "budget.threshold", data: dict[str, Any] | None = None) -> Delivery:
    return Delivery(
        id="msg_01abc",
        webhook_id="wh_1",
        event=event,
        payload={"type": event, "timestamp": "2026-11-21T12:00:00.000Z", "data": data or DATA[event]},
        attempts=1,
        next_attempt_at=START,
        delivered_at=None,
        last_error=None,
        created_at=START,
    )


class MailServer:
    """A mail server with the messages it has accepted; it answers DATA with `answer`."""

    def __init__(self, answer: str = "250 OK") -> None:
        self.answer = answer
        self.accepted: list[Envelope] = []
        self.port = 0

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Envelope) -> str:
        self.accepted.append(envelope)
        return self.answer

    def message(self) -> EmailMessage:
        """Return the last accepted message."""
        content = self.accepted[-1].content
        assert isinstance(content, bytes)
        message = message_from_bytes(content, policy=default)
        assert isinstance(message, EmailMessage)
        return message


def _authenticate(_server: Any, _session: Any, _envelope: Any, _mechanism: str, login: Any) -> AuthResult:
    return AuthResult(success=(login.login, login.password) == (b"gate@house", b"p:w/d"), handled=False)


@asynccontextmanager
async def mail_server(
    server: MailServer, *, implicit: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[MailServer]:
    """Run a mail server on a free local port."""
    loop = asyncio.get_running_loop()
    listening = await loop.create_server(
        lambda: SMTP(server, loop=loop, hostname="mail.test", **options), "127.0.0.1", 0, ssl=implicit
    )
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        await listening.wait_closed()


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    """A TLS certificate for 127.0.0.1."""
    return make_certificate(tmp_path)


async def send(url: str, what: Delivery | None = None, **options: Any) -> None:
    sender = MailSender(url, "gatehouse@box.example.com", **{"address": "https://llm.example.com", **options})
    try:
        await sender.send(MAILBOX, what or delivery(), START)
    finally:
        await sender.close()


async def test_a_message_has_identifying_headers() -> None:
    async with mail_server(MailServer()) as server:
        await send(f"smtp://127.0.0.1:{server.port}")
    message = server.message()
    assert server.accepted[0].rcpt_tos == ["ops@example.com"]
    assert server.accepted[0].mail_from == "gatehouse@box.example.com"
    assert message["From"] == "gatehouse@box.example.com"
    assert message["To"] == "ops@example.com"
    assert message["Subject"] == "[Gatehouse] Bob & <Söhne> has reached 80 % of the budget of 2026-11"
    assert message["Message-ID"] == "<msg_01abc@box.example.com>"
    assert message["Auto-Submitted"] == "auto-generated"
    assert parsedate_to_datetime(str(message["Date"])) == START


async def test_plain_text_and_html_have_the_same_content() -> None:
    async with mail_server(MailServer()) as server:
        await send(f"smtp://127.0.0.1:{server.port}")
    message = server.message()
    assert message.get_content_type() == "multipart/alternative"
    plain, page = (message.get_body((kind,)) for kind in ("plain", "html"))
    assert plain is not None
    assert page is not None
    for text in (plain.get_content(), page.get_content()):
        assert "81.23 EUR of 100.00 EUR" in text
        assert "https://llm.example.com" in text
    assert "Bob & <Söhne>" in plain.get_content()
    assert "Bob &amp; &lt;Söhne&gt;" in page.get_content()


BUDGET = {name: value for name, value in DATA["budget.threshold"].items() if name not in TENANT}
TOKENS = {name: value for name, value in DATA["tokens_per_day.threshold"].items() if name not in TENANT}
KEY = {**TENANT, "key_id": "key_1", "key_name": "ci"}


@pytest.mark.parametrize(
    ("whose", "who", "what"),
    [
        (TENANT, "Bob & <Söhne> has", ""),
        ({"scope": "tenant", **TENANT}, "Bob & <Söhne> has", ""),
        ({"scope": "tenant", **TENANT, "model": "demo"}, "Bob & <Söhne> has", " for the model demo"),
        ({"scope": "key", **KEY}, "The key ci of Bob & <Söhne> has", ""),
        ({"scope": "key", **KEY, "model": "demo"}, "The key ci of Bob & <Söhne> has", " for the model demo"),
        ({"scope": "model", "model": "demo"}, "All tenants together have", " for the model demo"),
    ],
    ids=["before there were scopes", "tenant", "tenant for a model", "key", "key for a model", "model"],
)
def test_a_threshold_says_whose_limit_was_reached(whose: dict[str, str], who: str, what: str) -> None:
    money = text_of("budget.threshold", {**whose, **BUDGET})
    assert money.sentence == f"{who} reached 80 % of the budget of 2026-11{what}: 81.23 EUR of 100.00 EUR."
    assert money.subject == f"[Gatehouse] {who} reached 80 % of the budget of 2026-11{what}"
    tokens = text_of("tokens_per_day.threshold", {**whose, **TOKENS})
    assert tokens.sentence == f"{who} reached 100 % of the token limit of 2026-11-21{what}: 1001 of 1000."
    assert [value for name, value in money.facts if name == "model"] == ([whose["model"]] if "model" in whose else [])


def test_amounts_have_no_unit_in_their_label_and_the_decimals_they_need() -> None:
    small = text_of("budget.threshold", {**TENANT, **BUDGET, "monthly_budget": 100, "spent_picos": 52_000_000})
    assert small.sentence.endswith("0.000052 EUR of 0.000100 EUR.")
    assert dict(small.facts)["monthly budget"] == "0.000100 EUR"
    assert dict(small.facts)["spent"] == "0.000052 EUR"
    bill = {**DATA["invoice.closed"], "tax_micros": 962_390, "due_micros": 6_030_000}
    closed = text_of("invoice.closed", {**bill, "total_micros": 6_027_602})
    facts = dict(closed.facts)
    assert (facts["total with tax"], facts["tax"], facts["amount due"]) == ("6.03 EUR", "0.96 EUR", "6.03 EUR")
    assert closed.sentence == "Invoice 2026-0007 of Bob & <Söhne> for 2026-10 is closed: 6.03 EUR due."
    credit = text_of("invoice.closed", {**bill, "due_micros": -6_030_000})
    assert credit.sentence.endswith("is closed: 6.03 EUR in favour of the customer.")
    in_yen = text_of("invoice.closed", {**bill, "due_micros": 2_301_000_000, "currency": "JPY"})
    assert in_yen.sentence.endswith("is closed: 2301 JPY due.")
    assert dict(in_yen.facts)["amount due"] == "2301 JPY"


@pytest.mark.parametrize(
    ("currency", "amounts"), [("KWD", ("6.028", "0.962", "6.028")), ("EUR", ("6.03", "0.96", "6.03")), ("JPY", ("6", "1", "6"))]
)
def test_every_amount_of_an_invoice_has_the_decimals_of_its_currency(currency: str, amounts: tuple[str, ...]) -> None:
    bill = {"total_micros": 6_027_602, "tax_micros": 962_000, "due_micros": 6_028_000, "currency": currency}
    facts = dict(text_of("invoice.closed", {**DATA["invoice.closed"], **bill}).facts)
    shown = [facts[name] for name in ("total with tax", "tax", "amount due")]
    assert shown == [f"{amount} {currency}" for amount in amounts]


@pytest.mark.parametrize(
    ("currency", "micros", "shown"),
    [
        ("EUR", 5_000_000, "5.00"), ("JPY", 5_000_000, "5"), ("KWD", 5_001_000, "5.001"),
        ("EUR", 5_001_000, "5.001000"), ("JPY", 5_010_000, "5.010000"),
    ],
)  # fmt: skip
def test_a_budget_has_the_decimals_of_its_currency_unless_it_needs_more(currency: str, micros: int, shown: str) -> None:
    budget = {"monthly_budget": micros, "spent_picos": micros * 10**6, "currency": currency}
    alert = text_of("budget.threshold", {**TENANT, **BUDGET, **budget})
    assert alert.sentence.endswith(f": {shown} {currency} of {shown} {currency}.")
    assert dict(alert.facts)["monthly budget"] == f"{shown} {currency}"


@pytest.mark.parametrize("event", [*EVENTS, TEST_EVENT])
def test_every_event_has_a_text(event: str) -> None:
    text = text_of(event, DATA[event])
    assert text.subject.startswith("[Gatehouse] ")
    assert text.sentence.endswith(".")
    assert "\n" not in text.subject
    assert text.plain(None)
    assert "None" not in text.plain(None)


async def test_starttls_is_used_and_its_certificate_checked(certificate: Certificate) -> None:
    async with mail_server(MailServer(), tls_context=certificate.server(), require_starttls=True) as server:
        await send(f"smtp+starttls://127.0.0.1:{server.port}", tls=certificate.client())
        with pytest.raises(SendFailed, match="certificate"):
            await send(f"smtp+starttls://127.0.0.1:{server.port}")
        with pytest.raises(SendFailed, match="STARTTLS"):
            await send(f"smtp://127.0.0.1:{server.port}")
    assert len(server.accepted) == 1


async def test_nothing_is_sent_if_starttls_is_configured_but_not_offered() -> None:
    async with mail_server(MailServer()) as server:
        with pytest.raises(SendFailed, match="STARTTLS"):
            await send(f"smtp+starttls://127.0.0.1:{server.port}")
    assert server.accepted == []


async def test_smtps_uses_tls_from_the_first_byte_and_checks_the_certificate(certificate: Certificate) -> None:
    async with mail_server(MailServer(), implicit=certificate.server()) as server:
        await send(f"smtps://127.0.0.1:{server.port}", tls=certificate.client())
        with pytest.raises(SendFailed, match="certificate"):
            await send(f"smtps://127.0.0.1:{server.port}")
    assert len(server.accepted) == 1


async def test_the_configured_login_is_percent_decoded(certificate: Certificate) -> None:
    options: dict[str, Any] = {"authenticator": _authenticate, "auth_required": True, "auth_require_tls": True}
    async with mail_server(MailServer(), tls_context=certificate.server(), **options) as server:
        await send(f"smtp+starttls://gate%40house:p%3Aw%2Fd@127.0.0.1:{server.port}", tls=certificate.client())
        with pytest.raises(SendFailed) as failure:
            await send(f"smtp+starttls://gate%40house:wrong-one@127.0.0.1:{server.port}", tls=certificate.client())
    assert "535" in str(failure.value)
    assert "wrong-one" not in str(failure.value)
    assert len(server.accepted) == 1


@pytest.mark.parametrize("answer", ["451 later, please", "550 no such mailbox", "554 5.7.1 looks like spam"])
async def test_a_refusal_is_a_failure_with_the_servers_message(answer: str) -> None:
    async with mail_server(MailServer(answer)) as server:
        with pytest.raises(SendFailed) as failure:
            await send(f"smtp://127.0.0.1:{server.port}")
    assert failure.value.reason == "mail"
    assert answer.split(" ", 1)[1] in str(failure.value)


@pytest.mark.parametrize(
    ("limit", "reason", "message"),
    [("step_timeout_s", "mail", "timed out"), ("timeout_s", "timeout", "within 0.05 s")],
)
async def test_a_hanging_mail_server_times_out(limit: str, reason: str, message: str) -> None:
    closed = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(SendFailed) as failure:
        await send(f"smtp://127.0.0.1:{port}", None, **{"step_timeout_s": 1.0, limit: 0.05})
    assert failure.value.reason == reason
    assert message in str(failure.value)
    await asyncio.wait_for(closed.wait(), 60)
    server.close()
    await server.wait_closed()


async def test_a_mail_server_that_cannot_be_reached_in_time_is_not_reported_as_the_whole_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def connect(*_args: object, **_options: object) -> socket.socket:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(SendFailed, match="did not accept the message: timed out") as failure:
        await send("smtp://127.0.0.1:25")
    assert failure.value.reason == "mail"


@pytest.mark.parametrize(("scheme", "port"), [("smtp", 25), ("smtp+starttls", 587), ("smtps", 465)])
async def test_a_mail_server_without_a_port_is_reached_at_the_standard_one(
    monkeypatch: pytest.MonkeyPatch, scheme: str, port: int
) -> None:
    plain, encrypted = (Mock(side_effect=ConnectionRefusedError(111, "refused")) for _ in range(2))
    monkeypatch.setattr(smtplib, "SMTP", plain)
    monkeypatch.setattr(smtplib, "SMTP_SSL", encrypted)
    with pytest.raises(SendFailed, match="refused"):
        await send(f"{scheme}://mail.example.com")
    used, unused = (encrypted, plain) if scheme == "smtps" else (plain, encrypted)
    assert used.call_args.args[:2] == ("mail.example.com", port)
    unused.assert_not_called()


async def test_an_unreachable_mail_server_is_a_failure() -> None:
    async with mail_server(MailServer()) as server:
        pass
    with pytest.raises(SendFailed, match="mail server"):
        await send(f"smtp://127.0.0.1:{server.port}")


@pytest.mark.parametrize("name", ["x" * 200, "名前" * 100, "שם", "a\u2028b", "=?utf-8?q?x?=", "Bcc: all@example.com"])
async def test_tenant_names_cannot_inject_headers(name: str) -> None:
    data = {**DATA["budget.threshold"], "tenant_name": name}
    async with mail_server(MailServer()) as server:
        await send(f"smtp://127.0.0.1:{server.port}", delivery(data=data))
    message = server.message()
    assert set(message.keys()) == {
        "From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted", "MIME-Version", "Content-Type"
    }  # fmt: skip
    assert str(message["Subject"]).strip().startswith("[Gatehouse] ")
    plain = message.get_body(("plain",))
    assert plain is not None
    assert name in plain.get_content()


def test_messages_to_two_mailboxes_differ_only_in_the_recipient() -> None:
    sender = MailSender("smtp://localhost:25", "gatehouse@box.example.com")
    other = dataclasses.replace(MAILBOX, target="bob@example.com")
    first, second = (sender.message(endpoint.target, delivery(), START) for endpoint in (MAILBOX, other))
    assert next(value for value in first.items() if value not in second.items()) == ("To", "ops@example.com")


async def test_started_alerts_check_at_once_and_deliver_to_webhooks_and_mailboxes(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "INTERVAL_S", 3600.0)
    async with mail_server(MailServer()) as server, receiving() as receiver:
        options = {
            "data_dir": tmp_path, "webhook_networks": ["127.0.0.0/8"], "smtp_url": f"smtp://127.0.0.1:{server.port}",
            "smtp_from": "gatehouse@box.example.com", "external_url": "https://llm.example.com",
        }  # fmt: skip
        alerts = Alerts(load_settings(options=options, environ={}), database, clock, BillingCalendar(), PEPPER)
        for kind, target in (("webhook", f"http://127.0.0.1:{receiver.port}/"), ("email", "ops@example.com")):
            await alerts.webhooks.create(kind=kind, target=target, access=OWNER)
        expiry = KeyChanges(expires_at=clock.now() + timedelta(days=10))
        await Keys(database, clock, PEPPER).create(cast.bob.tenant.id, "ci", expiry, access=OWNER)
        clock.advance(4 * 86400)
        models = ModelRegistry()
        alerts.start(models, Readiness(models, clock, interval_s=30.0), Metrics(), version="7.7")
        try:
            await poll_until(lambda: bool(server.accepted and receiver.requests))
        finally:
            await alerts.stop()
    assert receiver.json()["type"] == "key.expiring"
    assert receiver.requests[0][1]["user-agent"] == "gatehouse/7.7"
    assert server.accepted[0].mail_from == "gatehouse@box.example.com"
    assert "https://llm.example.com" in str(server.message().get_body(("plain",)))
