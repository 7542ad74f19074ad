"""Static files: vendored code as published, and templates that comply with the content policy."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from appliance.console.rendering import SCRIPTS, STATIC_DIR, STYLES, WEB_DIR, asset

VENDOR = STATIC_DIR / "vendor"
TEMPLATES = sorted((WEB_DIR / "templates").rglob("*.html"))
INLINE = re.compile(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=|hx-on|javascript:|hx-vals=.js:", re.IGNORECASE)


def vendored() -> dict[str, str]:
    """Return the hashes that the list of vendored files names."""
    rows = re.findall(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", (VENDOR / "README.md").read_text("utf-8"), re.MULTILINE)
    return dict(rows)


def test_vendored_files_are_those_that_were_published() -> None:
    assert {path.name for path in VENDOR.iterdir()} == {*vendored(), "README.md"}
    for name, expected in vendored().items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == expected, name


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_hold_nothing_that_the_content_policy_forbids(path: Path) -> None:
    assert not INLINE.findall(path.read_text("utf-8"))


def test_every_style_and_script_is_linked_and_nothing_else_lies_there() -> None:
    assert {path.stem for path in (STATIC_DIR / "css").iterdir()} == set(STYLES)
    assert {path.stem for path in (STATIC_DIR / "js").iterdir()} == set(SCRIPTS)


@pytest.mark.parametrize("path", sorted((STATIC_DIR / "js").iterdir()), ids=lambda path: path.name)
def test_scripts_stay_short_and_without_eval(path: Path) -> None:
    text = path.read_text("utf-8")

    assert len(text.splitlines()) <= 45
    assert not re.search(r"\beval\b|new Function|innerHTML|document\.write", text)


def test_the_address_of_a_file_changes_with_its_content() -> None:
    digest = hashlib.sha256((STATIC_DIR / "logo.svg").read_bytes()).hexdigest()

    assert asset("logo.svg") == f"/static/logo.svg?v={digest[:12]}"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_every_form_that_changes_something_carries_the_session_s_token(path: Path) -> None:
    forms = re.findall(r'<form[^>]*method="post".*?</form>', path.read_text("utf-8"), re.DOTALL)

    for form in forms:
        assert 'name="csrf_token"' in form or 'action="/login' in form, form[:120]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_form_in_the_dialog_is_sent_once_however_often_its_button_is_pressed(path: Path) -> None:
    forms = re.findall(r"<form[^>]*hx-post=[^>]*>", path.read_text("utf-8"))

    for form in forms:
        assert 'hx-disable="find button[type=submit]"' in form, form[:120]


def test_every_form_in_the_dialog_is_made_by_one_macro() -> None:
    by_hand = [path.name for path in TEMPLATES if 'hx-target="closest .sheet"' in path.read_text("utf-8")]

    assert by_hand == ["fields.html"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_button_that_acts_on_requests_looks_like_one(path: Path) -> None:
    buttons = re.findall(r'<button[^>]*class="quiet[^"]*".*?>([^<>]*)<', path.read_text("utf-8"))

    assert not set(buttons) & {"Filter", "Cancel", "Apply"}
