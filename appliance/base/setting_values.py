"""What a setting's value may be: each function here returns the value or raises ValueError (TypeError) with the rest of the
sentence "KEY …"; those with arguments return such a function."""

from __future__ import annotations

import ipaddress
import json
import os
import zoneinfo
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

MIB = 1024 * 1024
SECRET_CHARS_MIN = 8
PORT_MAX = 65535
Number = TypeVar("Number", int, float)
_SIZE_UNITS = {"kib": 1024, "mib": MIB, "gib": 1024 * MIB}
_SPECULATIVE_METHODS = ("ngram", "draft_model")
_SPECULATIVE_NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size")
_SHARED_PREFIXES_MAX = 256
_SHARED_PREFIXES_CHARS_MAX = 65536
"""Of their paths together: an engine is told its options in one argument, and Linux allows 128 KiB for that."""
_NETWORKS_MAX = 100
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a string that is not empty")
    return value.strip()


def bounded(
    kind: Callable[[Any], Number], accepted: tuple[type, ...], low: Number, high: Number, name: str
) -> Callable[[object], Number]:
    """Return a parser for numbers of one kind, given as such or as text."""
    message = f"must be {name} from {low} to {high}"

    def parse(value: object) -> Number:
        if isinstance(value, bool) or not isinstance(value, (*accepted, str)):
            raise TypeError(message)
        try:
            number = kind(value)
        except (ValueError, OverflowError):  # the latter of a whole number that no float holds
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
        try:
            number = whole(1, high)(value)
        except (TypeError, ValueError):
            raise ValueError(message) from None
        if number & (number - 1):
            raise ValueError(message)
        return number

    return parse


def context_len(value: object) -> int:
    """Return a length in tokens, of at least what an engine needs (`engine.memory.kv_plan`), in its words."""
    if str(value).strip() == "1":
        raise ValueError("(1) is too short: a request needs at least one prompt token and one answer token")
    return whole(2, 10_000_000)(value)


def size(low: int, high: int) -> Callable[[object], int]:
    """Return a parser for bytes: a whole number, or one with the unit KiB, MiB or GiB."""
    parse_number = whole(0, high)
    message = f"must be from {low} to {high} bytes, or a number and KiB, MiB or GiB"

    def parse(value: object) -> int:
        unit = 1
        if isinstance(value, str) and value.strip().lower()[-3:] in _SIZE_UNITS:
            unit = _SIZE_UNITS[value.strip().lower()[-3:]]
            value = value.strip()[:-3]
        try:
            number = parse_number(value) * unit
        except (TypeError, ValueError):
            raise ValueError(message) from None
        if not low <= number <= high:
            raise ValueError(message)
        return number

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
        raise ValueError(f"must have at least {SECRET_CHARS_MIN} characters and no space at either end")
    return value


def email(value: object) -> str:
    address = text(value)
    local, at, domain = address.partition("@")
    if not (local and at and domain) or "@" in domain or " " in address:
        raise ValueError("must be an e-mail address")
    return address.lower()


def currency(value: object) -> str:
    if not isinstance(value, str) or len(value) != 3 or not value.isascii() or not value.isalpha():
        raise ValueError("must be a currency code of three letters")
    return value.upper()


def _texts(value: object, message: str) -> tuple[str, ...]:
    """Return the texts of a list, or of one text with commas, none of them empty. Raises ValueError with `message`."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError(message)
    return tuple(item.strip() for item in items)


def files(value: object) -> tuple[str, ...]:
    """Return paths, absolute, of files that are there; text is a list with commas."""
    names = _texts(value, "must be a list of files")
    if len(names) > _SHARED_PREFIXES_MAX:
        raise ValueError(f"must name at most {_SHARED_PREFIXES_MAX} files")
    paths = [Path(name).expanduser().absolute() for name in names]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"must name files; {path} is not a file")
    found = tuple(str(path) for path in paths)
    if len(json.dumps(found)) > _SHARED_PREFIXES_CHARS_MAX:
        raise ValueError(f"must name files whose paths have at most {_SHARED_PREFIXES_CHARS_MAX} characters together")
    return found


def speculative(value: object) -> str | None:
    """Return the JSON text of an object or a TOML table; `off` is None."""
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
        raise ValueError(f"must name a folder as model; {folder} is not a folder")
    return json.dumps({**value, "model": str(folder)} if "model" in value else value)


def _check_speculative(config: Mapping[str, object]) -> None:
    unknown = [str(key) for key in config if key not in ("method", "model", *_SPECULATIVE_NUMBERS)]
    if unknown:
        raise ValueError(f"has an unknown key: {unknown[0]}")
    method, model = config.get("method"), config.get("model")
    if method not in _SPECULATIVE_METHODS:
        raise ValueError(f"needs a method, one of {', '.join(_SPECULATIVE_METHODS)}")
    if (method == "draft_model") != isinstance(model, str):
        raise ValueError("needs a model, the folder of a draft model, with method draft_model and with no other")
    for key in _SPECULATIVE_NUMBERS:
        number = config.get(key, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"must have a whole number from 1 as {key}")


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
    """Take `url` apart as the driver will. What is wrong in it may be part of a password, so it is not shown."""
    from sqlalchemy import make_url  # its import takes longer than all of this module, which every command has
    from sqlalchemy.exc import ArgumentError

    message = f"must have the form postgresql://USER:PASSWORD@HOST:PORT/NAME, with a port from 1 to {PORT_MAX}"
    place, _, query = url.partition("@")[2].partition("?")
    if "@" in place or any("@" in option.partition("=")[0] for option in query.split("&")):
        # The driver would end the password at the first @, and name the rest of it as a host that it cannot find.
        raise ValueError(f"{message}; write @ in the password as %40")
    try:
        port = make_url(url).port
    except (ValueError, ArgumentError):
        raise ValueError(message) from None
    if port is not None and not 1 <= port <= PORT_MAX:
        raise ValueError(message)


def time_zone(value: object) -> str:
    """Return the name of a time zone of the IANA database."""
    name = text(value)
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError("must be a time zone like Europe/Berlin or UTC") from None
    return name


def web_address(value: object) -> str:
    """Return an address of a site, without a slash at its end."""
    address = text(value)
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("must be an address like https://llm.example.com")
    return address.rstrip("/")


def mail_server(value: object) -> str:
    """Return the address of a mail server: smtp://, smtp+starttls:// or smtps://, with USER:PASSWORD@ if it asks for them."""
    address = text(value)
    message = "must be like smtps://USER:PASSWORD@HOST:465, smtp+starttls://HOST:587 or smtp://HOST:25"
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        raise ValueError(message) from None
    if parts.scheme not in ("smtp", "smtps", "smtp+starttls") or not parts.hostname or parts.path.strip("/") or port == 0:
        raise ValueError(message)
    return address


def networks(value: object) -> tuple[Network, ...]:
    """Return networks in CIDR notation; text is a list with commas."""
    items = value.split(",") if isinstance(value, str) else value
    message = "must be a list of networks like 10.0.0.0/8"
    if not isinstance(items, list | tuple) or len(items) > _NETWORKS_MAX or not all(isinstance(item, str) for item in items):
        raise ValueError(f"{message}, {_NETWORKS_MAX} at most")
    try:
        return tuple(ipaddress.ip_network(item.strip()) for item in items)
    except ValueError as error:
        raise ValueError(f"{message}: {error}") from None


def proxies(value: object) -> tuple[Network, ...]:
    """Return addresses and networks of proxies; a network that is everybody is refused."""
    found = networks(value)
    for network in found:
        if network.prefixlen == 0:
            raise ValueError(f"must name proxies; {network} covers every address")
    return found
