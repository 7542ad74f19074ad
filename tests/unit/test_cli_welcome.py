"""The text of a start: login and secrets once, and a curl command that a shell parses correctly."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from appliance.cli.welcome import Welcome, curl, login, ready

FIRST = Welcome(
    url="http://127.0.0.1:8000",
    model="demo",
    admin_email="admin@localhost",
    admin_password="pass-word",
    admin_token="gha_x",
    api_key="gh_abc_def",
)


def test_the_first_start_prints_login_and_key() -> None:
    printed = login(FIRST)
    assert all(part in printed for part in ("http://127.0.0.1:8000/", "admin@localhost", "pass-word", "gha_x", "gh_abc_def"))


def test_the_example_command_has_the_new_key_and_repeats_no_other_secret() -> None:
    printed = ready(FIRST)
    assert "Authorization: Bearer gh_abc_def" in printed
    assert "http://127.0.0.1:8000/" in printed
    assert not any(secret in printed for secret in ("pass-word", "gha_x"))


def test_a_password_set_by_the_operator_is_not_printed() -> None:
    printed = login(Welcome(url="http://127.0.0.1:8000", model="demo", admin_email="a@example.org", api_key="gh_abc_def"))
    assert "Sign in as    a@example.org" in printed
    assert "as set by you" in printed


def test_a_later_start_prints_how_to_reset_the_password() -> None:
    printed = ready(Welcome(url="http://127.0.0.1:8000", model="demo"))
    assert "admin reset-password" in printed
    assert "shown on the first start" in printed


def test_a_later_start_prints_the_command_with_this_installation_s_path() -> None:
    later = Welcome(url="http://h:1", model="demo", command="/opt/g/.venv/bin/gatehouse", data_dir=Path("/srv/my data"))
    assert "/opt/g/.venv/bin/gatehouse admin reset-password E-MAIL --data-dir '/srv/my data'" in ready(later)


def test_the_curl_command_is_one_line_that_a_shell_parses_correctly() -> None:
    line = curl(FIRST.url, "odd \"name's", "gh_abc_def")
    assert "\n" not in line
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer gh_abc_def" in words
    assert json.loads(words[-1])["model"] == "odd \"name's"
