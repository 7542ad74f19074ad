"""The settings of the appliance: keys, defaults and limits. Loaded once at startup, never at import."""

from __future__ import annotations

import os
import platform
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from appliance.base import setting_values as parsers
from appliance.base.engine_settings import ModelSettings, PerModelSettings, parse_models
from appliance.base.texts import did_you_mean

ENVIRONMENT_PREFIX = "GATEHOUSE_"
FILE_NAME = "gatehouse.toml"
_TESTS_ONLY = {"REQUIRE"}  # GATEHOUSE_REQUIRE is read by the test suite only
_NOT_IN_FILE = {"data_dir"}  # the file is inside it
ENGINE_SWITCHES = ("graphs", "early_launch", "overlapped_prefill", "busy_wait", "measured_kernels")
"""Engine features that can be switched off to locate a fault; the engine reads environment variables of these names."""
_NEEDED_TOGETHER = (
    ("oidc_issuer", "oidc_client_id"),
    ("oidc_client_id", "oidc_issuer"),
    ("oidc_issuer", "external_url"),  # the provider redirects back to it
    ("oidc_client_secret", "oidc_issuer"),
    ("oidc_name", "oidc_issuer"),
    ("smtp_url", "smtp_from"),
)


class SettingsError(Exception):
    """A setting is unknown or invalid. The message names its key and source, and never the value of a secret."""


class UnusableData(Exception):
    """The data directory or database cannot be used by this version. The message says what to do."""


def _models(value: object) -> tuple[ModelSettings, ...]:
    return parse_models(value, appliance_keys=_PARSERS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings(PerModelSettings):
    """The settings of an appliance, each annotated with its parser from `setting_values`. Empty `models` means the bundled
    demo model."""

    data_dir: Annotated[Path, parsers.folder]
    database_url: Annotated[str, parsers.database_url] = field(repr=False)
    host: Annotated[str, parsers.text] = "127.0.0.1"
    port: Annotated[int, parsers.whole(0, parsers.PORT_MAX)] = 8000
    models: Annotated[tuple[ModelSettings, ...], _models] = ()
    admin_email: Annotated[str | None, parsers.email] = None
    admin_password: Annotated[str | None, parsers.secret] = field(default=None, repr=False)
    admin_token: Annotated[str | None, parsers.secret] = field(default=None, repr=False)
    log_level: Annotated[str, parsers.choice("debug", "info", "warning", "error")] = "info"
    log_json: Annotated[bool | None, parsers.flag] = None
    max_body_bytes: Annotated[int, parsers.size(1024, 1024 * parsers.MIB)] = 10 * parsers.MIB
    drain_timeout_s: Annotated[float, parsers.seconds(0, 3600)] = 30.0
    graphs: Annotated[bool, parsers.flag] = True
    early_launch: Annotated[bool, parsers.flag] = True
    overlapped_prefill: Annotated[bool, parsers.flag] = True
    busy_wait: Annotated[bool, parsers.flag] = True
    measured_kernels: Annotated[bool, parsers.flag] = True
    max_waiting_requests: Annotated[int, parsers.whole(0, 1_000_000)] = 1024
    queue_deadline_s: Annotated[float, parsers.seconds(0.1, 3600)] = 600.0
    request_deadline_s: Annotated[float, parsers.seconds(1, 86_400)] = 3600.0
    stream_buffer_events: Annotated[int, parsers.whole(1, 65536)] = 256
    probe_interval_s: Annotated[float, parsers.seconds(1, 3600)] = 30.0
    currency: Annotated[str, parsers.currency] = "EUR"
    unpriced: Annotated[str, parsers.choice("serve", "refuse")] = "serve"
    session_idle_s: Annotated[int, parsers.whole(60, 366 * 86400)] = 8 * 3600
    session_absolute_s: Annotated[int, parsers.whole(60, 366 * 86400)] = 7 * 24 * 3600
    secure_cookies: Annotated[bool, parsers.flag] = False
    external_url: Annotated[str | None, parsers.web_address] = None
    time_zone: Annotated[str, parsers.time_zone] = "UTC"
    request_history_days: Annotated[int, parsers.whole(1, 36500)] = 90
    oidc_issuer: Annotated[str | None, parsers.web_address] = None
    oidc_client_id: Annotated[str | None, parsers.text] = None
    oidc_client_secret: Annotated[str | None, parsers.secret] = field(default=None, repr=False)
    oidc_name: Annotated[str | None, parsers.text] = None
    smtp_url: Annotated[str | None, parsers.mail_server] = field(default=None, repr=False)
    smtp_from: Annotated[str | None, parsers.email] = None
    webhook_networks: Annotated[tuple[parsers.Network, ...], parsers.networks] = ()
    trusted_proxies: Annotated[tuple[parsers.Network, ...], parsers.proxies] = ()

    def for_model(self, model: ModelSettings) -> Settings:
        """Return these settings with the overrides of one model applied."""
        return replace(self, **model.own)

    @property
    def switched_off(self) -> tuple[str, ...]:
        """The names in ENGINE_SWITCHES that are switched off."""
        return tuple(name for name in ENGINE_SWITCHES if not getattr(self, name))


def default_data_dir() -> Path:
    """Return the default data folder: XDG_DATA_HOME on Linux, Application Support on macOS, LOCALAPPDATA on Windows."""
    home = Path.home()
    system = platform.system()
    if system == "Darwin":
        return home / "Library" / "Application Support" / "gatehouse"
    if system == "Windows":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "gatehouse"
    return Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share") / "gatehouse"


def local_url(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a service that listens on `host`."""
    loopbacks = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - looked up here, not bound
    address = loopbacks.get(host, host)
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


def load_settings(*, options: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """Return the settings from `options`, then `GATEHOUSE_*`, then `gatehouse.toml` in the data directory, then defaults.

    Options that are None count as not given. Raises SettingsError, which names the key and its source.
    """
    given = {key: value for key, value in options.items() if value is not None}
    from_options = _parse_source(given, lambda key: f"option {key}")
    from_environ = _parse_source(_environment(environ), lambda key: f"environment {_variable(key)}", spelled=_variable)
    data_dir = from_options.get("data_dir") or from_environ.get("data_dir") or default_data_dir()
    path = data_dir / FILE_NAME
    from_file = _parse_source(_read_file(path), lambda key: f"{key} in {path}")
    values = {**from_file, **from_environ, **from_options, "data_dir": data_dir}
    values.setdefault("database_url", f"sqlite:///{data_dir / 'gatehouse.db'}")
    settings = Settings(**values)
    _check_together(settings)
    return settings


def _environment(environ: Mapping[str, str]) -> dict[str, object]:
    names = {
        name.removeprefix(ENVIRONMENT_PREFIX): value for name, value in environ.items() if name.startswith(ENVIRONMENT_PREFIX)
    }
    return {name.lower(): value for name, value in names.items() if name not in _TESTS_ONLY}


def _read_file(path: Path) -> dict[str, object]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return {}  # an impossible data folder is reported when it is created
    except OSError as error:
        raise SettingsError(f"this user cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text: {error}") from error
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # besides TOMLDecodeError: integers over 4300 digits, lists nested too deeply
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
    misplaced = _NOT_IN_FILE & values.keys()
    if misplaced:
        raise SettingsError(f"{misplaced.pop()} cannot be set in {path}, because that file is inside it")
    return values


def _variable(key: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{key.upper()}"


def _parse_source(
    values: Mapping[str, object], name_of: Callable[[str], str], *, spelled: Callable[[str], str] = str
) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for key, value in values.items():
        parser = _PARSERS.get(key)
        if parser is None:
            raise SettingsError(f"unknown setting: {name_of(key)}{did_you_mean(key, _PARSERS, spelled=spelled)}")
        try:
            parsed[key] = parser(value)
        except (ValueError, TypeError) as error:
            raise SettingsError(f"{name_of(key)} {error}") from None
    return parsed


def _check_together(settings: Settings) -> None:
    idle_s, absolute_s = settings.session_idle_s, settings.session_absolute_s
    if idle_s > absolute_s:
        raise SettingsError(f"session_idle_s ({idle_s}) is longer than session_absolute_s ({absolute_s})")
    for first, needed in _NEEDED_TOGETHER:
        if getattr(settings, first) and not getattr(settings, needed):
            raise SettingsError(f"{first} requires {needed} to be set too")


_PARSERS: dict[str, Callable[[object], Any]] = {
    key: hint.__metadata__[0] for key, hint in get_type_hints(Settings, include_extras=True).items()
}
