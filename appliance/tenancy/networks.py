"""The networks that a key may be used from: parses CIDR text and matches addresses. Also the network by which sign-in attempts
are rate limited. Knows no table."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence

from appliance.base.errors import AddressNotAllowed, InvalidValue
from appliance.tenancy.fields import LIST_ITEMS_MAX

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
"""IPv4-mapped IPv6 addresses, as a dual-stack socket reports IPv4 clients."""
IPV6_CLIENT_BITS = 64  # a subscriber has at least a /64 (RFC 6177), so all its addresses count as one client


def check_networks(value: Sequence[str]) -> tuple[str, ...]:
    """Return the networks in CIDR form; a single address becomes a /32 or /128."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > LIST_ITEMS_MAX:
        raise InvalidValue(f"allowed_networks must be a list of at most {LIST_ITEMS_MAX} networks", param="allowed_networks")
    return tuple(dict.fromkeys(str(_network(item)) for item in value))


def _network(text: object) -> Network:
    """Return the network as `is_in` compares it: IPv4-mapped IPv6 becomes IPv4."""
    try:
        if not isinstance(text, str):
            raise TypeError
        network = ipaddress.ip_network(text.strip())
        if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(MAPPED):
            return ipaddress.IPv4Network((network.network_address.packed[-4:], network.prefixlen - MAPPED.prefixlen))
        return network
    except (TypeError, ValueError):
        raise InvalidValue(f"allowed_networks: {text!r} is not a network like 10.0.0.0/8", param="allowed_networks") from None


@functools.lru_cache(maxsize=128)
def parse_networks(texts: tuple[str, ...] | None) -> tuple[Network, ...] | None:
    """Return the networks that `check_networks` returned as text; None for all.

    Cached, because 200 of IPv6 take 9 ms and a changed key is checked for each of its waiting requests.
    """
    return None if texts is None else tuple(map(ipaddress.ip_network, texts))


def check_address(address: str, networks: tuple[Network, ...] | None) -> None:
    """Raise AddressNotAllowed if a key that may be used from `networks` (None: from all) is used from `address`."""
    if networks is not None and not is_in(address, networks):
        raise AddressNotAllowed("this key may not be used from this address")


def is_in(address: str, networks: tuple[Network, ...]) -> bool:
    """Return whether `address` is in one of `networks`. An IPv4-mapped IPv6 address counts as IPv4."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed in network for network in networks)


def client_network(address: str) -> str:
    """Return the key by which `address` is rate limited: an IPv4 address itself, or the /64 of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    return str(parsed.ipv4_mapped or ipaddress.IPv6Network((int(parsed), IPV6_CLIENT_BITS), strict=False))
