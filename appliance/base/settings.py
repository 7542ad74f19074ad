"""The settings of one appliance: every key, its default and its limits. Read once at start, never at import."""

from __future__ import annotations

import dataclasses
import os
import platform
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from appliance.base import setting_values as values_of

ENVIRONMENT_PREFIX = "GATEHOUSE_"
FILE_NAME = "gatehouse.toml"
_TESTS_ONLY = {"REQUIRE"}  # GATEHOUSE_REQUIRE speaks to the test suite
_NOT_IN_FILE = {"data_dir"}  # the file lies in it
ENGINE_SWITCHES = ("graphs", "early_launch", "overlapped_prefill")
"""Parts of the engine that can be turned off to tell whether a fault is in them; it reads variables of these names."""
_NEEDED_TOGETHER = (
    ("oidc_issuer", "oidc_client_id"),
    ("oidc_client_id", "oidc_issuer"),
    ("oidc_issuer", "external_url"),  # the provider sends people back to it
    ("oidc_client_secret", "oidc_issuer"),
    ("oidc_name", "oidc_issuer"),
    ("smtp_url", "smtp_from"),
)


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
    dtype: str = "auto"
    admin_email: str | None = None
    admin_password: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    log_level: str = "info"
    log_json: bool | None = None
    max_body_bytes: int = 10 * values_of.MIB
    drain_timeout_s: float = 30.0
    engine_threads: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    block_size: int = 16
    quantization: str | None = None
    head_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    swap_space_gib: float = 0.0
    speculative: str | None = None
    batch_invariant: bool = False
    enforce_eager: bool = False
    graphs: bool = True
    early_launch: bool = True
    overlapped_prefill: bool = True
    scheduling_policy: str = "fair"
    inter_token_target_ms: float | None = None
    shared_prefixes: tuple[str, ...] = ()
    max_waiting_requests: int = 1024
    queue_deadline_s: float = 600.0
    request_deadline_s: float = 3600.0
    stream_buffer_events: int = 256
    probe_interval_s: float = 30.0
    currency: str = "EUR"
    unpriced: str = "serve"
    session_idle_s: int = 8 * 3600
    session_absolute_s: int = 7 * 24 * 3600
    secure_cookies: bool = False
    external_url: str | None = None
    time_zone: str = "UTC"
    request_history_days: int = 90
    oidc_issuer: str | None = None
    oidc_client_id: str | None = None
    oidc_client_secret: str | None = field(default=None, repr=False)
    oidc_name: str | None = None
    smtp_url: str | None = field(default=None, repr=False)
    smtp_from: str | None = None
    webhook_networks: tuple[values_of.Network, ...] = ()
    trusted_proxies: tuple[values_of.Network, ...] = ()

    @property
    def switched_off(self) -> tuple[str, ...]:
        """The keys of ENGINE_SWITCHES that are off."""
        return tuple(name for name in ENGINE_SWITCHES if not getattr(self, name))


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
    for first, needed in _NEEDED_TOGETHER:
        if values.get(first) and not values.get(needed):
            raise SettingsError(f"{first} needs {needed} as well")


def _default(name: str) -> Any:
    return next(f.default for f in dataclasses.fields(Settings) if f.name == name)


_PARSERS: dict[str, Callable[[object], Any]] = {
    "host": values_of.text,
    "port": values_of.whole(0, values_of.PORT_MAX),
    "data_dir": values_of.folder,
    "database_url": values_of.database_url,
    "models": values_of.models,
    "device": values_of.choice("auto", "cuda", "cpu"),
    "dtype": values_of.choice("auto", "float32", "bfloat16", "float16"),
    "admin_email": values_of.email,
    "admin_password": values_of.secret,
    "admin_token": values_of.secret,
    "log_level": values_of.choice("debug", "info", "warning", "error"),
    "log_json": values_of.flag,
    "max_body_bytes": values_of.size(1024, 1024 * values_of.MIB),
    "drain_timeout_s": values_of.seconds(0, 3600),
    "engine_threads": values_of.whole(1, 1024),
    "max_num_seqs": values_of.whole(1, 1024),
    "max_num_batched_tokens": values_of.whole(1, 1_000_000),
    "max_model_len": values_of.whole(1, 10_000_000),
    "kv_cache_bytes": values_of.size(values_of.MIB, 1024**5),
    "gpu_memory_utilization": values_of.number(0.01, 1),
    "enable_prefix_caching": values_of.flag,
    "block_size": values_of.power_of_two(1024),
    "quantization": values_of.choice("int8", "fp8", "awq", "gptq", "compressed-tensors"),
    "head_quantization": values_of.choice("none", "int8"),
    "kv_cache_dtype": values_of.choice("auto", "fp8", "fp8_e4m3"),
    "swap_space_gib": values_of.number(0, 4096),
    "speculative": values_of.speculative,
    "batch_invariant": values_of.flag,
    "enforce_eager": values_of.flag,
    "graphs": values_of.flag,
    "early_launch": values_of.flag,
    "overlapped_prefill": values_of.flag,
    "scheduling_policy": values_of.choice("fair", "fcfs"),
    "inter_token_target_ms": values_of.number(0.1, 60_000),
    "shared_prefixes": values_of.files,
    "max_waiting_requests": values_of.whole(0, 1_000_000),
    "queue_deadline_s": values_of.seconds(0.1, 3600),
    "request_deadline_s": values_of.seconds(1, 86_400),
    "stream_buffer_events": values_of.whole(1, 65536),
    "probe_interval_s": values_of.seconds(1, 3600),
    "currency": values_of.currency,
    "unpriced": values_of.choice("serve", "refuse"),
    "session_idle_s": values_of.whole(60, 366 * 86400),
    "session_absolute_s": values_of.whole(60, 366 * 86400),
    "secure_cookies": values_of.flag,
    "external_url": values_of.web_address,
    "time_zone": values_of.time_zone,
    "request_history_days": values_of.whole(1, 36500),
    "oidc_issuer": values_of.web_address,
    "oidc_client_id": values_of.text,
    "oidc_client_secret": values_of.secret,
    "oidc_name": values_of.text,
    "smtp_url": values_of.mail_server,
    "smtp_from": values_of.email,
    "webhook_networks": values_of.networks,
    "trusted_proxies": values_of.proxies,
}
