"""Static files and templates: hashes of vendored libraries, content security policy, and CSRF tokens in forms."""

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


def test_vendored_files_have_the_recorded_hashes() -> None:
    assert {path.name for path in VENDOR.iterdir()} == {*vendored(), "README.md"}
    for name, expected in vendored().items():
        assert hashlib.sha256((VENDOR / name).read_bytes()).hexdigest() == expected, name


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_templates_have_no_inline_code_or_styles(path: Path) -> None:
    assert not INLINE.findall(path.read_text("utf-8"))


def test_every_style_sheet_and_script_is_linked() -> None:
    assert {path.stem for path in (STATIC_DIR / "css").iterdir()} == set(STYLES)
    assert {path.stem for path in (STATIC_DIR / "js").iterdir()} == set(SCRIPTS)


@pytest.mark.parametrize("path", sorted((STATIC_DIR / "js").iterdir()), ids=lambda path: path.name)
def test_scripts_are_short_and_use_no_eval(path: Path) -> None:
    text = path.read_text("utf-8")

    assert len(text.splitlines()) <= 45
    assert not re.search(r"\beval\b|new Function|innerHTML|document\.write", text)


def test_the_url_of_a_static_file_contains_its_hash() -> None:
    digest = hashlib.sha256((STATIC_DIR / "logo.svg").read_bytes()).hexdigest()

    assert asset("logo.svg") == f"/static/logo.svg?v={digest[:12]}"


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_every_post_form_has_a_csrf_token(path: Path) -> None:
    forms = re.findall(r'<form[^>]*method="post".*?</form>', path.read_text("utf-8"), re.DOTALL)

    for form in forms:
        assert 'name="csrf_token"' in form or 'action="/login' in form, form[:120]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_every_htmx_form_disables_its_button_while_submitting(path: Path) -> None:
    forms = re.findall(r"<form[^>]*hx-post=[^>]*>", path.read_text("utf-8"))

    for form in forms:
        assert 'hx-disable="find button[type=submit]"' in form, form[:120]


def test_every_dialog_form_is_made_by_one_macro() -> None:
    by_hand = [path.name for path in TEMPLATES if 'hx-target="closest .sheet"' in path.read_text("utf-8")]

    assert by_hand == ["fields.html"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_buttons_that_act_have_no_quiet_style(path: Path) -> None:
    buttons = re.findall(r'<button[^>]*class="quiet[^"]*".*?>([^<>]*)<', path.read_text("utf-8"))

    assert not set(buttons) & {"Filter", "Cancel", "Apply"}
