"""Alerts over HTTP: signed, to the checked address, without redirects, and within their deadline."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from appliance.base.logging import configure_logging
from appliance.metering.alerts.outbox import Delivery
from appliance.metering.alerts.signature import new_signing_secret, signature
from appliance.metering.alerts.targets import Address, TargetPolicy
from appliance.metering.alerts.webhooks import Endpoint
from appliance.serving.alerting.delivery import SendFailed
from appliance.serving.alerting.http import HttpSender
from tests.support.alerts import LOOPBACK, receiving
from tests.support.certificates import make_certificate
from tests.support.clock import START

SECRETS = (new_signing_secret(), new_signing_secret())
DELIVERY = Delivery(
    id="msg_1",
    webhook_id="wh_1",
    event="key.expiring",
    payload={"type": "key.expiring", "timestamp": "2026-11-21T12:00:00.000Z", "data": {"key_name": "schlüssel"}},
    attempts=1,
    next_attempt_at=START,
    delivered_at=None,
    last_error=None,
    created_at=START,
)


def endpoint(target: str) -> Endpoint:
    return Endpoint(id="wh_1", kind="webhook", target=target, secrets=SECRETS)


def names(**addresses: str | list[str]) -> Any:
    """Return a resolver that knows these names (with _ for a dot) and maps IP addresses to themselves."""

    async def resolve(host: str, port: int) -> Sequence[Address]:
        try:
            return [ipaddress.ip_address(host)]
        except ValueError:
            found = addresses.get(host.replace(".", "_"), [])
        if not found:
            raise OSError(-2, f"nobody knows {host}:{port}")
        return [ipaddress.ip_address(address) for address in ([found] if isinstance(found, str) else found)]

    return resolve


class Sending:
    """Creates senders and closes them."""

    def __init__(self) -> None:
        self.made: list[HttpSender] = []

    async def __call__(
        self, target: str, *, target_policy: TargetPolicy = LOOPBACK, now: datetime = START, **options: Any
    ) -> None:
        sender = HttpSender(target_policy, version="test", **{"resolve": names(), **options})
        self.made.append(sender)
        await sender.send(endpoint(target), DELIVERY, now)


@pytest.fixture
async def send() -> AsyncIterator[Sending]:
    """A function that sends DELIVERY to a target."""
    sending = Sending()
    yield sending
    for sender in sending.made:
        await sender.close()


async def refused(work: Any) -> SendFailed:
    with pytest.raises(SendFailed) as failure:
        await work
    return failure.value


async def test_a_receiver_can_verify_the_signature(send: Sending) -> None:
    async with receiving() as receiver:
        await send(f"http://127.0.0.1:{receiver.port}/alerts?team=a")
    line, headers, body = receiver.requests[0]
    assert line == "POST /alerts?team=a HTTP/1.1"
    assert headers["host"] == f"127.0.0.1:{receiver.port}"
    assert headers["content-type"] == "application/json"
    assert headers["user-agent"] == "gatehouse/test"
    assert headers["webhook-id"] == "msg_1"
    assert int(headers["webhook-timestamp"]) == START.timestamp()
    signed = [signature(secret, "msg_1", int(headers["webhook-timestamp"]), body) for secret in SECRETS]
    assert headers["webhook-signature"].split(" ") == signed
    assert json.loads(body) == DELIVERY.payload


@pytest.mark.usefixtures("own_logging")
async def test_a_delivery_leaves_no_path_of_its_url_in_the_log(send: Sending, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("debug", json=True)
    async with receiving() as receiver:
        await send(f"http://127.0.0.1:{receiver.port}/services/confidential?token=hidden")
    logging.getLogger("some.library").debug("logging works")
    log = capsys.readouterr().err
    assert "logging works" in log
    assert "confidential" not in log
    assert "hidden" not in log


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
async def test_every_2xx_counts_as_delivered(send: Sending, status: int) -> None:
    async with receiving(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n".encode()) as receiver:
        await send(f"http://127.0.0.1:{receiver.port}/")


@pytest.mark.parametrize(
    ("status", "reason"),
    [(400, "refused"), (401, "refused"), (404, "refused"), (429, "refused"), (500, "failed"), (503, "failed"), (410, "gone")],
)
async def test_other_statuses_are_failures_with_a_reason(send: Sending, status: int, reason: str) -> None:
    async with receiving(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n".encode()) as receiver:
        failure = await refused(send(f"http://127.0.0.1:{receiver.port}/"))
    assert failure.reason == reason
    assert str(status) in str(failure)


@pytest.mark.parametrize(
    ("status", "header", "wait_s"),
    [(503, "120", 120.0), (429, "7", 7.0), (500, "120", 0.0), (503, "-1", 0.0), (503, "soon", 0.0), (503, "9" * 30, 0.0)],
)
async def test_retry_after_is_read_for_429_and_503(send: Sending, status: int, header: str, wait_s: float) -> None:
    answer = f"HTTP/1.1 {status} X\r\nretry-after: {header}\r\ncontent-length: 0\r\n\r\n"
    async with receiving(answer.encode()) as receiver:
        failure = await refused(send(f"http://127.0.0.1:{receiver.port}/"))
    assert failure.retry_after_s == wait_s


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(send: Sending, status: int) -> None:
    async with receiving() as elsewhere:
        answer = f"HTTP/1.1 {status} X\r\nlocation: http://127.0.0.1:{elsewhere.port}/\r\ncontent-length: 0\r\n\r\n"
        async with receiving(answer.encode()) as receiver:
            failure = await refused(send(f"http://127.0.0.1:{receiver.port}/"))
    assert failure.reason == "redirect"
    assert elsewhere.requests == []


async def test_the_body_of_an_endless_response_is_not_read(send: Sending) -> None:
    async with receiving(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n" + b"x" * 1000) as receiver:
        await send(f"http://127.0.0.1:{receiver.port}/")


async def test_a_hanging_receiver_times_out(send: Sending) -> None:
    async with receiving(b"") as receiver:
        failure = await refused(send(f"http://127.0.0.1:{receiver.port}/", timeout_s=0.05))
    assert failure.reason == "timeout"


async def test_a_receiver_that_sends_slowly_times_out(send: Sending) -> None:
    left = asyncio.Event()

    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\n")
            while not writer.is_closing():
                writer.write(b"x: y\r\n")
                await writer.drain()
                await asyncio.sleep(0.005)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        left.set()

    server = await asyncio.start_server(drip, "127.0.0.1", 0)
    failure = await refused(send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", timeout_s=0.1))
    await asyncio.wait_for(left.wait(), 60)
    server.close()
    await server.wait_closed()
    assert failure.reason == "timeout"


@pytest.mark.parametrize(
    "answer", [b"\x00\x01\x02", b"HTTP/1.1 200", b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n" + b"x" * 300_000]
)
async def test_a_response_that_is_not_http_is_a_failure(send: Sending, answer: bytes) -> None:
    async with receiving(answer) as receiver:
        failure = await refused(send(f"http://127.0.0.1:{receiver.port}/"))
    assert failure.reason == "connect"
    assert len(str(failure)) < 300


async def test_a_closed_port_is_a_failure(send: Sending) -> None:
    async with receiving() as receiver:
        pass
    assert (await refused(send(f"http://127.0.0.1:{receiver.port}/"))).reason == "connect"


async def test_an_unknown_host_name_is_a_failure(send: Sending) -> None:
    failure = await refused(send("https://nowhere.example.com/"))
    assert failure.reason == "name"
    assert str(failure) == "the name nowhere.example.com cannot be resolved: nobody knows nowhere.example.com:443"


async def test_the_system_resolver_is_used_by_default(send: Sending) -> None:
    async with receiving() as receiver:
        await send(f"http://localhost:{receiver.port}/", resolve=None)
        no_name = await refused(send(f"http://{'x' * 70}.example.com:{receiver.port}/", resolve=None))
    assert len(receiver.requests) == 1
    assert no_name.reason == "name"


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "0.0.0.0", "::1", "fd00::1", "fe80::1", "::ffff:127.0.0.1"]
)
async def test_a_name_that_resolves_to_an_internal_address_is_refused(send: Sending, address: str) -> None:
    async with receiving() as receiver:
        target = f"https://innocent.example.com:{receiver.port}/"
        failure = await refused(send(target, target_policy=TargetPolicy(), resolve=names(innocent_example_com=address)))
    assert failure.reason == "address"
    assert receiver.requests == []


async def test_a_public_address_is_refused_without_tls(send: Sending) -> None:
    failure = await refused(send("http://open.example.com/", resolve=names(open_example_com="1.1.1.1")))
    assert failure.reason == "address"


async def test_the_next_address_is_tried_when_one_refuses_the_connection(send: Sending) -> None:
    async with receiving() as receiver:
        both = names(two_example_com=["127.99.99.99", "127.0.0.1"])
        await send(f"http://two.example.com:{receiver.port}/", resolve=both)
    assert receiver.requests[0][1]["host"] == f"two.example.com:{receiver.port}"


async def test_the_certificate_must_match_the_host_name(send: Sending, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path, "alerts.example.com")
    known = names(alerts_example_com="127.0.0.1", other_example_com="127.0.0.1")
    async with receiving(tls=certificate.server()) as receiver:
        await send(f"https://alerts.example.com:{receiver.port}/", resolve=known, tls=certificate.client())
        wrong = await refused(send(f"https://other.example.com:{receiver.port}/", resolve=known, tls=certificate.client()))
        unknown = await refused(send(f"https://alerts.example.com:{receiver.port}/", resolve=known))
    assert (wrong.reason, unknown.reason) == ("connect", "connect")
    assert "certificate" in str(wrong)
    assert len(receiver.requests) == 1


async def test_no_proxy_of_the_environment_is_used(send: Sending, monkeypatch: pytest.MonkeyPatch) -> None:
    async with receiving() as proxy, receiving() as receiver:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        await send(f"http://127.0.0.1:{receiver.port}/")
    assert (len(receiver.requests), len(proxy.requests)) == (1, 0)
