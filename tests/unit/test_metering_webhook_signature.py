"""Webhook signatures follow the Standard Webhooks specification, and targets are checked."""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.base.errors import InvalidValue
from appliance.metering.alerts.signature import new_signing_secret, signature, signature_headers
from appliance.metering.alerts.targets import TargetPolicy, check_mailbox, check_web_target, redact_target

OFFICE = TargetPolicy((ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("fd00::/8")))


def test_the_example_of_the_specification_has_its_published_signature() -> None:
    secret, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    signed = signature(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert signed == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_the_verification_example_in_the_guide_accepts_only_our_signatures() -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text("utf-8")
    example = re.search(r"```python\n(.*?def verify.*?)```", guide, re.DOTALL)
    assert example
    names: dict[str, Any] = {}
    exec(example[1], names)
    verify, secrets, body = names["verify"], [new_signing_secret(), new_signing_secret()], b'{"type": "x"}'
    headers = signature_headers(secrets, "msg_1", int(time.time()), body)
    for secret in secrets:
        verify(secret, headers, body)
    old = signature_headers(secrets, "msg_1", int(time.time()) - 3600, body)
    for wrong in ((new_signing_secret(), headers, body), (secrets[0], headers, body + b" "), (secrets[0], old, body)):
        with pytest.raises(ValueError, match=r"not signed|too old"):
            verify(*wrong)


def test_a_new_secret_has_the_format_that_receivers_require() -> None:
    secret = new_signing_secret()
    assert secret.startswith("whsec_")
    assert 24 <= len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) <= 64
    assert secret != new_signing_secret()


def test_during_a_rotation_messages_are_signed_with_each_secret() -> None:
    secrets = [new_signing_secret(), new_signing_secret()]
    headers = signature_headers(secrets, "msg_1", 1700000000, b"{}")
    assert headers["webhook-id"] == "msg_1"
    assert headers["webhook-timestamp"] == "1700000000"
    for secret, signed in zip(secrets, headers["webhook-signature"].split(" "), strict=True):
        key = base64.b64decode(secret.removeprefix("whsec_"))
        expected = base64.b64encode(hmac.new(key, b"msg_1.1700000000.{}", hashlib.sha256).digest()).decode()
        assert signed == f"v1,{expected}"


@pytest.mark.parametrize(
    "target",
    [
        "https://example.com",
        "https://example.com:8443/alerts?team=a",
        "https://Alerts.example.com./",
        "https://my_host/",
        "https://1.1.1.1/x",
        "https://[2606:4700::1111]/x",
        "https://10.1.2.3/x",
        "http://10.1.2.3:8080/x",
        "http://alerts.internal/x",
        "https://[fd00::5]/x",
        "https://example.com/" + "x" * 1980,
    ],
)
def test_a_permitted_url_is_accepted_unchanged(target: str) -> None:
    assert check_web_target(target, OFFICE) == target


@pytest.mark.parametrize(
    "target",
    [
        "",
        "example.com",
        "ftp://example.com/",
        "https://",
        "https:///x",
        "https://example..com/",
        "https://.example.com/",
        "https://exa%6dple.com/",
        "https://" + "x" * 64 + ".com/",
        "https://" + "x." * 127 + "com/",
        "https://user:secret@example.com/",
        "https://user@example.com/",
        "https://:secret@example.com/",
        "https://example.com/#x",
        "https://example.com:0/",
        "https://example.com:99999/",
        "https://example.com:x/",
        "https://exa mple.com/",
        "https://example.com/\r\nhost: other",
        "https://beispiel.de/ü",
        "https://[::1",
        "https://127.0.0.1/",
        "https://10.2.0.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://0.0.0.0/",
        "https://[::1]/",
        "https://[::ffff:10.2.0.1]/",
        "https://[64:ff9b::a02:1]/",
        "https://[::127.0.0.1]/",
        "https://[::10.0.0.1]/",
        "https://[::ffff:0:127.0.0.1]/",
        "https://[fec0::1]/",
        "https://[5f00::1]/",
        "https://[3fff::1]/",
        "https://192.88.99.1/",
        "https://[2002:a02:1::]/",
        "https://[fe80::1]/",
        "https://224.0.0.1/",
        "http://1.1.1.1/",
        "https://example.com/" + "x" * 1981,
        None,
        7,
        ["https://example.com/"],
    ],
)
def test_a_url_that_is_invalid_or_not_permitted_is_refused(target: object) -> None:
    with pytest.raises(InvalidValue) as refused:
        check_web_target(target, OFFICE)
    assert refused.value.param == "target"


def test_plain_http_is_permitted_only_in_networks_listed_by_the_operator() -> None:
    with pytest.raises(InvalidValue, match="webhook_networks"):
        check_web_target("http://alerts.internal/", TargetPolicy())
    assert check_web_target("https://alerts.example.com/", TargetPolicy()) == "https://alerts.example.com/"
    listed, other = ipaddress.ip_address("10.1.0.9"), ipaddress.ip_address("1.1.1.1")
    assert OFFICE.allows(listed, encrypted=False)
    assert OFFICE.allows(ipaddress.ip_address("::ffff:10.1.0.9"), encrypted=False)
    assert OFFICE.allows(other, encrypted=True)
    assert not OFFICE.allows(other, encrypted=False)


@pytest.mark.parametrize(
    "mailbox", ["bob@example.com", "a.b+c@mail.example.co.uk", "root@localhost", "b" * 64 + "@" + "x" * 63 + ".y" * 63]
)
def test_a_single_mailbox_is_accepted(mailbox: str) -> None:
    assert check_mailbox(mailbox) == mailbox


@pytest.mark.parametrize(
    "mailbox",
    [
        "",
        "bob",
        "@example.com",
        "bob@",
        "bob@example.com, charlie@example.com",
        "bob@example.com\r\nBcc: all@example.com",
        "Bob <bob@example.com>",
        "böb@example.com",
        "bob@exämple.com",
        "bob@example..com",
        "b" * 65 + "@example.com",
        "b" * 64 + "@" + "x" * 63 + ".y" * 62 + ".yz",
        None,
        1,
    ],
)
def test_anything_but_a_single_mailbox_is_refused(mailbox: object) -> None:
    with pytest.raises(InvalidValue) as refused:
        check_mailbox(mailbox)
    assert refused.value.param == "target"


def test_the_path_of_a_url_is_redacted() -> None:
    assert redact_target("webhook", "https://hooks.example.com:8443/services/T0/secret?x=1") == "https://hooks.example.com:8443"
    assert redact_target("email", "bob@example.com") == "bob@example.com"
