"""Parsers of setting values: each returns the value, or raises ValueError or TypeError with the rest of the sentence "KEY …".
Functions with limits or choices as arguments return such a parser."""

from __future__ import annotations

import ipaddress
import json
import os
import zoneinfo
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from appliance.base.texts import did_you_mean

MIB = 1024 * 1024
SECRET_CHARS_MIN = 8
PORT_MAX = 65535
Number = TypeVar("Number", int, float)
_SIZE_UNITS = {"kib": 1024, "mib": MIB, "gib": 1024 * MIB}
_SPECULATIVE_METHODS = ("ngram", "draft_model")
_SPECULATIVE_NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size")
_SHARED_PREFIXES_MAX = 256
_SHARED_PREFIXES_CHARS_MAX = 65536
"""Total length of their paths: an engine gets its options in one argument, which Linux limits to 128 KiB."""
_NETWORKS_MAX = 100
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a non-empty string")
    return value.strip()


def bounded(
    kind: Callable[[Any], Number], accepted: tuple[type, ...], low: Number, high: Number, name: str
) -> Callable[[object], Number]:
    """Return a parser for numbers from `low` to `high`, given as one of the `accepted` types or as text."""
    message = f"must be {name} from {low} to {high}"

    def parse(value: object) -> Number:
        if isinstance(value, bool) or not isinstance(value, (*accepted, str)):
            raise TypeError(message)
        try:
            number = kind(value)
        except (ValueError, OverflowError):  # OverflowError: an integer too large for a float
            raise ValueError(message) from None
        if not low <= number <= high:
            raise ValueError(message)
        return number

    return parse


def whole(low: int, high: int) -> Callable[[object], int]:
    return bounded(int, (int,), low, high, "a whole number")


def power_of_two(high: int) -> Callable[[object], int]:
    message = f"must be a power of two from 1 to {high}"

    def parse(value: object) -> int:
        with suppress(TypeError, ValueError):
            number = whole(1, high)(value)
            if number.bit_count() == 1:
                return number
        raise ValueError(message)

    return parse


def context_len(value: object) -> int:
    """Parse a length in tokens; the minimum and its message are those of the engine (`engine.memory.kv_plan`)."""
    if str(value).strip() == "1":
        raise ValueError("(1) is too short: a request needs at least one prompt token and one answer token")
    return whole(2, 10_000_000)(value)


def size(low: int, high: int) -> Callable[[object], int]:
    """Return a parser for sizes in bytes: a whole number, optionally with the unit KiB, MiB or GiB."""
    parse_number = whole(0, high)
    message = f"must be from {low} to {high} bytes, or a whole number with the unit KiB, MiB or GiB"

    def parse(value: object) -> int:
        unit = 1
        if isinstance(value, str) and value.strip().lower()[-3:] in _SIZE_UNITS:
            unit = _SIZE_UNITS[value.strip().lower()[-3:]]
            value = value.strip()[:-3]
        with suppress(TypeError, ValueError):
            number = parse_number(value) * unit
            if low <= number <= high:
                return number
        raise ValueError(message)

    return parse


def seconds(low: float, high: float) -> Callable[[object], float]:
    return bounded(float, (int, float), low, high, "a number of seconds")


def number(low: float, high: float) -> Callable[[object], float]:
    return bounded(float, (int, float), low, high, "a number")


def flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise ValueError("must be true or false")


def choice(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value.strip().lower()

    return parse


def secret(value: object) -> str:
    if not isinstance(value, str) or len(value) < SECRET_CHARS_MIN or value != value.strip():
        raise ValueError(f"must have at least {SECRET_CHARS_MIN} characters, without leading or trailing spaces")
    return value


def email(value: object) -> str:
    address = text(value)
    local, at, domain = address.partition("@")
    if not (local and at and domain) or "@" in domain or " " in address:
        raise ValueError("must be an e-mail address")
    return address.lower()


def currency(value: object) -> str:
    if not isinstance(value, str) or len(value) != 3 or not value.isascii() or not value.isalpha():
        raise ValueError("must be a three-letter currency code")
    return value.upper()


def _strings(value: object, message: str) -> tuple[str, ...]:
    """Return the non-empty strings of a list or of a comma-separated string. Raises ValueError with `message`."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError(message)
    return tuple(item.strip() for item in items)


def files(value: object) -> tuple[str, ...]:
    """Parse a list, or a comma-separated string, of existing files. Returns absolute paths."""
    names = _strings(value, "must be a list of files")
    if len(names) > _SHARED_PREFIXES_MAX:
        raise ValueError(f"must list at most {_SHARED_PREFIXES_MAX} files")
    paths = [Path(name).expanduser().absolute() for name in names]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"must list existing files; {path} is not a file")
    found = tuple(str(path) for path in paths)
    if len(json.dumps(found)) > _SHARED_PREFIXES_CHARS_MAX:
        raise ValueError(f"must list files whose paths have at most {_SHARED_PREFIXES_CHARS_MAX} characters in total")
    return found


def speculative(value: object) -> str | None:
    """Parse a JSON object or a TOML table into JSON text; `off` is None."""
    if isinstance(value, str):
        if value.strip().lower() == "off":
            return None
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError('must be off or a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}') from None
    if not isinstance(value, dict):
        raise TypeError("must be off, a JSON object or a table")
    _check_speculative(value)
    folder = Path(value.get("model", ".")).expanduser().absolute()
    if not folder.is_dir():
        raise ValueError(f"must have an existing folder as model; {folder} is not a folder")
    return json.dumps({**value, "model": str(folder)} if "model" in value else value)


def _check_speculative(config: Mapping[str, object]) -> None:
    known = ("method", "model", *_SPECULATIVE_NUMBERS)
    unknown = [str(key) for key in config if key not in known]
    if unknown:
        raise ValueError(f"has an unknown key: {unknown[0]}{did_you_mean(unknown[0], known)}")
    method, model = config.get("method"), config.get("model")
    if method not in _SPECULATIVE_METHODS:
        raise ValueError(f"requires method to be one of {', '.join(_SPECULATIVE_METHODS)}")
    if (method == "draft_model") != isinstance(model, str):
        raise ValueError("requires model (the folder of a draft model) with method draft_model, and only with it")
    for key in _SPECULATIVE_NUMBERS:
        number = config.get(key, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"requires {key} to be a whole number from 1")


def folder(value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ValueError("must be a folder")
    folder = Path(value).expanduser().absolute()
    if os.path.exists(folder) and not folder.is_dir():
        raise ValueError(f"must be a folder; {folder} is a file")
    return folder


def database_url(value: object) -> str:
    url = text(value)
    if not url.startswith(("sqlite:///", "postgresql://", "postgres://")):
        raise ValueError("must begin with sqlite:///, postgresql:// or postgres://")
    if url in ("sqlite:///", "sqlite:///:memory:"):
        raise ValueError("must name a file: sqlite:///PATH")
    if not url.startswith("sqlite:///"):
        _check_server_url(url)
    return url


def _check_server_url(url: str) -> None:
    """Parse `url` like the driver. Messages show no part of it, because any part may belong to a password."""
    from sqlalchemy import (
        make_url,
    )  # imported here, because it takes longer than this whole module, which every command imports
    from sqlalchemy.exc import ArgumentError

    message = f"must have the form postgresql://USER:PASSWORD@HOST:PORT/NAME, with a port from 1 to {PORT_MAX}"
    place, _, query = url.partition("@")[2].partition("?")
    if "@" in place or any("@" in option.partition("=")[0] for option in query.split("&")):
        # The driver would end the password at the first @ and show the rest of it as an unknown host.
        raise ValueError(f"{message}; write @ in the password as %40")
    try:
        port = make_url(url).port
    except (ValueError, ArgumentError):
        raise ValueError(message) from None
    if port is not None and not 1 <= port <= PORT_MAX:
        raise ValueError(message)


def time_zone(value: object) -> str:
    """Parse the name of a time zone in the IANA database."""
    name = text(value)
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError("must be a time zone such as Europe/Berlin or UTC") from None
    return name


def web_address(value: object) -> str:
    """Parse the URL of a site. Returned without a trailing slash."""
    address = text(value)
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("must be a URL such as https://llm.example.com")
    return address.rstrip("/")


def mail_server(value: object) -> str:
    """Parse the URL of a mail server: smtp://, smtp+starttls:// or smtps://, with USER:PASSWORD@ if it requires them."""
    address = text(value)
    message = "must be a URL such as smtps://USER:PASSWORD@HOST:465, smtp+starttls://HOST:587 or smtp://HOST:25"
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        raise ValueError(message) from None
    if parts.scheme not in ("smtp", "smtps", "smtp+starttls") or not parts.hostname or parts.path.strip("/") or port == 0:
        raise ValueError(message)
    return address


def networks(value: object) -> tuple[Network, ...]:
    """Parse a list, or a comma-separated string, of networks in CIDR notation."""
    items = value.split(",") if isinstance(value, str) else value
    message = "must be a list of networks such as 10.0.0.0/8"
    if not isinstance(items, list | tuple) or len(items) > _NETWORKS_MAX or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{message}, {_NETWORKS_MAX} at most")
    try:
        return tuple(ipaddress.ip_network(item.strip()) for item in items)
    except ValueError as error:
        raise ValueError(f"{message}: {error}") from None


def proxies(value: object) -> tuple[Network, ...]:
    """Parse addresses and networks of proxies. A network that covers every address is refused."""
    found = networks(value)
    for network in found:
        if network.prefixlen == 0:
            raise ValueError(f"must list only proxies; {network} covers every address")
    return found
