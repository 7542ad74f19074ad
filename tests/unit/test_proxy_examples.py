"""The configurations of proxies in the guide fit the settings and the timeouts of the HTTP server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from appliance.api import http_server, sse
from appliance.api.auth import PROXY_HEADERS
from appliance.base.setting_values import MIB
from appliance.base.settings import Settings, load_settings

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
FORWARDED = {"X-Forwarded-For", "X-Forwarded-Proto"}


@pytest.fixture
def defaults(tmp_path: Path) -> Settings:
    """The settings of an operator who has set nothing."""
    return load_settings(options={"data_dir": tmp_path}, environ={})


def section() -> str:
    return GUIDE.read_text("utf-8").partition("\n## Behind a proxy\n")[2].partition("\n## ")[0]


def example(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", section(), re.DOTALL)
    assert found
    return found[1]


def whole(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, pattern
    return int(found[1])


@pytest.mark.parametrize("language", ["nginx", "caddy"])
def test_requests_go_to_the_default_address(language: str, defaults: Settings) -> None:
    assert f"{defaults.host}:{defaults.port}" in example(language)


def test_nginx_leaves_the_limit_of_bodies_to_gatehouse(defaults: Settings) -> None:
    assert whole(r"client_max_body_size (\d+)m;", example("nginx")) * MIB > defaults.max_body_bytes


def test_nginx_waits_as_long_as_a_request_may_take(defaults: Settings) -> None:
    assert whole(r"proxy_read_timeout (\d+)s;", example("nginx")) >= defaults.request_deadline_s


def test_nginx_passes_the_host_and_the_headers_that_mark_a_proxy() -> None:
    headers = dict(re.findall(r"proxy_set_header ([\w-]+) (\S+);", example("nginx")))
    assert headers["Host"] == "$http_host"
    assert set(headers) - {"Host", "Connection"} == FORWARDED
    assert {header.lower() for header in FORWARDED} <= set(PROXY_HEADERS)


def test_caddy_closes_idle_connections_before_gatehouse_does() -> None:
    assert whole(r"keepalive (\d+)s", example("caddy")) < http_server.KEEP_ALIVE_S


def test_the_guide_has_the_times_of_the_server() -> None:
    assert f"before Gatehouse does, after {http_server.KEEP_ALIVE_S} s" in section()
    assert f"a comment every {sse.PING_AFTER_S:.0f} s" in section()


def test_streams_ask_nginx_not_to_buffer_them() -> None:
    assert (b"x-accel-buffering", b"no") in sse.HEADERS
    assert "`X-Accel-Buffering: no`" in section()
