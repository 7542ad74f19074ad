"""The settings of one appliance: every key, its default and its limits. Read once at start, never at import."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ENVIRONMENT_PREFIX = "GATEHOUSE_"
FILE_NAME = "gatehouse.toml"
MIB = 1024 * 1024
SECRET_CHARS_MIN = 8
PORT_MAX = 65535
Number = TypeVar("Number", int, float)
_TESTS_ONLY = {"REQUIRE"}  # GATEHOUSE_REQUIRE speaks to the test suite
_SIZE_UNITS = {"kib": 1024, "mib": MIB, "gib": 1024 * MIB}
_NOT_IN_FILE = {"data_dir"}  # the file lies in it
_SPECULATIVE_METHODS = ("ngram", "draft_model")
_SPECULATIVE_NUMBERS = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "disable_by_batch_size")
_SHARED_PREFIXES_MAX = 1000


class SettingsError(Exception):
    """A setting is unknown or cannot be used. The message names key and source, and never a secret's value."""


class UnusableData(Exception):
    """What lies in the data directory or database cannot be used by this version. The message says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What one appliance runs with. `models` empty means the bundled demo model; None means that the engine chooses.

    `speculative` is a JSON object with vLLM's keys, as text; None is off. `shared_prefixes` are files.
    """

    data_dir: Path
    database_url: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 8000
    models: tuple[str, ...] = ()
    device: str = "auto"
    admin_email: str | None = None
    admin_password: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    log_level: str = "info"
    log_json: bool | None = None
    max_body_bytes: int = 10 * MIB
    drain_timeout_s: float = 30.0
    engine_threads: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    block_size: int = 16
    swap_space_gib: float = 0.0
    speculative: str | None = None
    batch_invariant: bool = False
    scheduling_policy: str = "fair"
    inter_token_target_ms: float | None = None
    shared_prefixes: tuple[str, ...] = ()
    max_waiting_requests: int = 1024
    queue_deadline_s: float = 600.0
    stream_buffer_events: int = 256
    probe_interval_s: float = 30.0
    currency: str = "EUR"
    session_idle_s: int = 8 * 3600
    session_absolute_s: int = 7 * 24 * 3600
    secure_cookies: bool = False


def default_data_dir() -> Path:
    """Return the platform's folder for a program's own data: XDG on Linux, Application Support on macOS, LOCALAPPDATA."""
    home = Path.home()
    system = platform.system()
    if system == "Darwin":
        return home / "Library" / "Application Support" / "gatehouse"
    if system == "Windows":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "gatehouse"
    return Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "gatehouse"


def load_settings(*, options: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Return the settings from `options`, then `GATEHOUSE_*`, then `gatehouse.toml` in the data directory, then defaults.

    An option that is None was not given. Raises SettingsError naming the key and where it stood.
    """
    given = {key: value for key, value in options.items() if value is not None}
    from_options = _parse_source(given, lambda key: f"option {key}")
    from_environ = _parse_source(_environment(environ), lambda key: f"environment {ENVIRONMENT_PREFIX}{key.upper()}")
    data_dir = from_options.get("data_dir") or from_environ.get("data_dir") or default_data_dir()
    path = data_dir / FILE_NAME
    from_file = _parse_source(_read_file(path), lambda key: f"{key} in {path}")
    values = {**from_file, **from_environ, **from_options, "data_dir": data_dir}
    values.setdefault("database_url", f"sqlite:///{data_dir / 'gatehouse.db'}")
    _check_together(values)
    return Settings(**values)


def _environment(environ: Mapping[str, str]) -> dict[str, object]:
    names = {
        name.removeprefix(ENVIRONMENT_PREFIX): value for name, value in environ.items() if name.startswith(ENVIRONMENT_PREFIX)
    }
    return {name.lower(): value for name, value in names.items() if name not in _TESTS_ONLY}


def _read_file(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}  # a data folder that cannot be is told of by whoever makes it
    except OSError as error:
        raise SettingsError(f"{path} cannot be read by this user: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not text in UTF-8: {error}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    misplaced = _NOT_IN_FILE & values.keys()
    if misplaced:
        raise SettingsError(f"{misplaced.pop()} cannot be set in {path}, which lies in it")
    return values


def _parse_source(values: Mapping[str, object], name_of: Callable[[str], str]) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        parser = _PARSERS.get(key)
        if parser is None:
            raise SettingsError(f"unknown setting: {name_of(key)}")
        try:
            parsed[key] = parser(value)
        except (ValueError, TypeError) as error:
            raise SettingsError(f"{name_of(key)} {error}") from None
    return parsed


def _check_together(values: Mapping[str, Any]) -> None:
    idle_s = values.get("session_idle_s", _default("session_idle_s"))
    absolute_s = values.get("session_absolute_s", _default("session_absolute_s"))
    if idle_s > absolute_s:
        raise SettingsError(f"session_idle_s ({idle_s}) is longer than session_absolute_s ({absolute_s})")


def _default(name: str) -> Any:
    return next(f.default for f in dataclasses.fields(Settings) if f.name == name)


# Parsers: each returns the value or raises ValueError (TypeError) with the rest of the sentence "KEY ...".


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a text that is not empty")
    return value.strip()


def _bounded(
    kind: Callable[[Any], Number], accepted: tuple[type, ...], low: Number, high: Number, name: str
) -> Callable[[object], Number]:
    """Return a parser for numbers of one kind, given as such or as text."""
    message = f"must be {name} from {low} to {high}"

    def parse(value: object) -> Number:
        if isinstance(value, bool) or not isinstance(value, (*accepted, str)):
            raise TypeError(message)
        try:
            number = kind(value)
        except ValueError:
            raise ValueError(message) from None
        if not low <= number <= high:
            raise ValueError(message)
        return number

    return parse


def _whole(low: int, high: int) -> Callable[[object], int]:
    return _bounded(int, (int,), low, high, "a whole number")


def _size(low: int, high: int) -> Callable[[object], int]:
    """Return a parser for bytes: a whole number, or one with the unit KiB, MiB or GiB."""
    whole = _whole(0, high)

    def parse(value: object) -> int:
        unit = 1
        if isinstance(value, str) and value.strip().lower()[-3:] in _SIZE_UNITS:
            unit = _SIZE_UNITS[value.strip().lower()[-3:]]
            value = value.strip()[:-3]
        number = whole(value) * unit
        if not low <= number <= high:
            raise ValueError(f"must be from {low} to {high} bytes")
        return number

    return parse


def _seconds(low: float, high: float) -> Callable[[object], float]:
    return _bounded(float, (int, float), low, high, "a number of seconds")


def _number(low: float, high: float) -> Callable[[object], float]:
    return _bounded(float, (int, float), low, high, "a number")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if isinstance(value, str) and value.strip().lower() in words:
        return words[value.strip().lower()]
    raise ValueError("must be true or false")


def _choice(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value.strip().lower()

    return parse


def _secret(value: object) -> str:
    if not isinstance(value, str) or len(value) < SECRET_CHARS_MIN or value != value.strip():
        raise ValueError(f"must have at least {SECRET_CHARS_MIN} characters and no space at either end")
    return value


def _email(value: object) -> str:
    text = _text(value)
    local, at, domain = text.partition("@")
    if not (local and at and domain) or "@" in domain or " " in text:
        raise ValueError("must be an e-mail address")
    return text.lower()


def _currency(value: object) -> str:
    if not isinstance(value, str) or len(value) != 3 or not value.isascii() or not value.isalpha():
        raise ValueError("must be a currency code of three letters")
    return value.upper()


def _models(value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError("must be a list of paths or names")
    return tuple(item.strip() for item in items)


def _files(value: object) -> tuple[str, ...]:
    """Return paths, absolute, of files that are there; text is a list with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError("must be a list of files")
    if len(items) > _SHARED_PREFIXES_MAX:
        raise ValueError(f"must name at most {_SHARED_PREFIXES_MAX} files")
    paths = [Path(item.strip()).expanduser().absolute() for item in items]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"must name files, and {path} is none")
    return tuple(str(path) for path in paths)


def _speculative(value: object) -> str | None:
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
        raise ValueError(f"must name a folder as model, and {folder} is none")
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


def _folder(value: object) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value).strip():
        raise ValueError("must be a folder")
    folder = Path(value).expanduser().absolute()
    if os.path.exists(folder) and not folder.is_dir():
        raise ValueError(f"must be a folder, and {folder} is a file")
    return folder


def _database_url(value: object) -> str:
    url = _text(value)
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
    try:
        port = make_url(url).port
    except (ValueError, ArgumentError):
        raise ValueError(message) from None
    if port is not None and not 1 <= port <= PORT_MAX:
        raise ValueError(message)


_PARSERS: dict[str, Callable[[object], Any]] = {
    "host": _text,
    "port": _whole(0, PORT_MAX),
    "data_dir": _folder,
    "database_url": _database_url,
    "models": _models,
    "device": _choice("auto", "cuda", "cpu"),
    "admin_email": _email,
    "admin_password": _secret,
    "admin_token": _secret,
    "log_level": _choice("debug", "info", "warning", "error"),
    "log_json": _flag,
    "max_body_bytes": _size(1024, 1024 * MIB),
    "drain_timeout_s": _seconds(0, 3600),
    "engine_threads": _whole(1, 1024),
    "max_num_seqs": _whole(1, 4096),
    "max_num_batched_tokens": _whole(1, 1_000_000),
    "max_model_len": _whole(1, 10_000_000),
    "kv_cache_bytes": _size(MIB, 1024**5),
    "block_size": _whole(1, 1024),
    "swap_space_gib": _number(0, 1024 * 1024),
    "speculative": _speculative,
    "batch_invariant": _flag,
    "scheduling_policy": _choice("fair", "fcfs"),
    "inter_token_target_ms": _number(0.1, 60_000),
    "shared_prefixes": _files,
    "max_waiting_requests": _whole(0, 1_000_000),
    "queue_deadline_s": _seconds(0.1, 3600),
    "stream_buffer_events": _whole(1, 65536),
    "probe_interval_s": _seconds(1, 3600),
    "currency": _currency,
    "session_idle_s": _whole(60, 366 * 86400),
    "session_absolute_s": _whole(60, 366 * 86400),
    "secure_cookies": _flag,
}
