"""Validates targets of alerts: IP addresses, URLs and mailboxes. Resolves no names and sends nothing.

A tenant's manager chooses a target, and the appliance connects to it from inside the operator's network (SSRF). So an address
that is not on the public internet is allowed only if the operator lists its network, and plain http only there.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from appliance.base.errors import InvalidValue

TARGET_CHARS_MAX = 2000
MAILBOX_CHARS_MAX = 254  # RFC 5321 section 4.5.3.1.3, without the angle brackets
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_URL = re.compile(r"[!-~]+", re.ASCII)
_HOST = re.compile(r"(?=.{1,253}$)([a-z0-9_-]{1,63}\.)*[a-z0-9_-]{1,63}\.?", re.ASCII)
_MAILBOX = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", re.ASCII)
# IPv6 addresses that route to an embedded IPv4 address (RFC 6052, 3056, 4380): whether that one is public is unknown here.
_EMBEDS_IPV4 = tuple(ipaddress.ip_network(text) for text in ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
# IPv6 assigns only this range as global unicast (RFC 4291, IANA), and within it 3fff::/20 is for documentation (RFC 9637). The
# IPv4 addresses of 6to4 relays (RFC 7526) lead to unknown hosts.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NO_KNOWN_HOST = tuple(ipaddress.ip_network(text) for text in ("3fff::/20", "192.88.99.0/24"))


@dataclass(frozen=True, slots=True)
class TargetPolicy:
    """The addresses that alerts may be sent to: the public internet, and the networks listed by the operator."""

    networks: Sequence[Network] = ()

    def is_listed(self, address: Address) -> bool:
        """Return whether `address` is in a network listed by the operator, where plain http is allowed too."""
        unmapped = _unmap_ipv4(address)
        return any(unmapped in network for network in self.networks)

    def allows(self, address: Address, *, encrypted: bool) -> bool:
        """Return whether alerts may be sent to `address`."""
        return self.is_listed(address) or (encrypted and _is_public(_unmap_ipv4(address)))


def _unmap_ipv4(address: Address) -> Address:
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST:
        return False
    if any(address in network for network in (*_EMBEDS_IPV4, *_NO_KNOWN_HOST)):
        return False
    return address.is_global and not address.is_multicast


def check_web_target(value: object, target_policy: TargetPolicy) -> str:
    """Return `value` if it is a URL that alerts may be posted to; its host name is not resolved here."""
    text = _check_text(value, TARGET_CHARS_MAX)
    problem = _url_problem(text, target_policy)
    if problem is not None:
        raise InvalidValue(f"target {problem}", param="target")
    return text


def _url_problem(text: str, target_policy: TargetPolicy) -> str | None:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return "must be a URL like https://example.com/alerts"
    host = parts.hostname
    if not _URL.fullmatch(text) or parts.scheme not in ("https", "http") or not host or port == 0:
        return "must be a URL like https://example.com/alerts, in ASCII"
    if parts.username is not None or "#" in text:
        return "must have neither user nor fragment"
    if parts.scheme == "http" and not target_policy.networks:
        return "must begin with https://: plain http is for networks that the operator lists (webhook_networks)"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None if _HOST.fullmatch(host) else "must name a host, in ASCII"
    if not target_policy.allows(address, encrypted=parts.scheme == "https"):
        return "is an address that the operator does not list (webhook_networks)"
    return None


def check_mailbox(value: object) -> str:
    """Return `value` if it is one e-mail address."""
    text = _check_text(value, MAILBOX_CHARS_MAX)
    if not _MAILBOX.fullmatch(text):
        raise InvalidValue("target must be one e-mail address, in ASCII", param="target")
    return text


def _check_text(value: object, chars_max: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= chars_max:
        raise InvalidValue(f"target must be a string of 1 to {chars_max} characters", param="target")
    return value


def redact_target(kind: str, target: str) -> str:
    """Return a target without the path of its URL, which is often a secret."""
    if kind != "webhook":
        return target
    parts = urlsplit(target)
    return f"{parts.scheme}://{parts.netloc}"
