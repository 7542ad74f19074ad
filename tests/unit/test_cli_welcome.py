"""The output of a start: secrets once, and a command that shells parse correctly."""

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


def test_the_first_start_shows_login_and_key() -> None:
    said = login(FIRST)
    assert all(part in said for part in ("http://127.0.0.1:8000/", "admin@localhost", "pass-word", "gha_x", "gh_abc_def"))


def test_the_command_to_try_holds_the_new_key_and_no_other_secret_is_said_twice() -> None:
    said = ready(FIRST)
    assert "Authorization: Bearer gh_abc_def" in said
    assert "http://127.0.0.1:8000/" in said
    assert not any(secret in said for secret in ("pass-word", "gha_x"))


def test_a_password_that_the_operator_has_set_is_not_printed_but_the_login_is() -> None:
    said = login(Welcome(url="http://127.0.0.1:8000", model="demo", admin_email="a@example.org", api_key="gh_abc_def"))
    assert "Sign in as    a@example.org" in said
    assert "as set by you" in said


def test_a_later_start_says_how_to_get_a_new_login() -> None:
    said = ready(Welcome(url="http://127.0.0.1:8000", model="demo"))
    assert "admin reset-password" in said
    assert "shown on the first start" in said


def test_a_later_start_names_the_command_as_it_is_typed_here() -> None:
    later = Welcome(url="http://h:1", model="demo", command="/opt/g/.venv/bin/gatehouse", data_dir=Path("/srv/my data"))
    assert "/opt/g/.venv/bin/gatehouse admin reset-password E-MAIL --data-dir '/srv/my data'" in ready(later)


def test_the_curl_line_is_one_line_that_a_shell_takes_apart_rightly() -> None:
    line = curl(FIRST.url, "odd \"name's", "gh_abc_def")
    assert "\n" not in line
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert "Authorization: Bearer gh_abc_def" in words
    assert json.loads(words[-1])["model"] == "odd \"name's"
