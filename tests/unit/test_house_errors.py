"""The error hierarchy: code, status and docstring of every class, its diagram, and the table of the API reference."""

from __future__ import annotations

import re
from pathlib import Path

from appliance.base import errors
from appliance.base.errors import GatehouseError

API_REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
STATUSES = {400, 401, 403, 404, 409, 413, 429, 500, 503}


def error_classes(kind: type[GatehouseError]) -> list[type[GatehouseError]]:
    return [
        kind,
        *(deeper for child in kind.__subclasses__() if child.__module__ == errors.__name__ for deeper in error_classes(child)),
    ]


def test_every_error_has_a_code_a_status_and_a_docstring() -> None:
    for kind in error_classes(GatehouseError):
        assert kind.status in STATUSES, kind
        assert kind.code, kind
        assert kind.__dict__.get("__doc__"), kind


def test_the_diagram_shows_every_error_class() -> None:
    drawing = (errors.__doc__ or "").partition("\n\n")[2]
    drawn = {word.strip(",") for word in drawing.split() if word.strip(",").isalpha() and word.strip(",") != "xx"}
    assert drawn == {kind.__name__ for kind in error_classes(GatehouseError)}


def test_the_api_reference_lists_every_code_under_its_status() -> None:
    table = API_REFERENCE.read_text("utf-8").partition("\n## Errors\n")[2].partition("\n\n[")[0]
    documented, status = set(), 0
    for row in re.findall(r"^\| (\d*) ?\|[^|]*\|([^|]*)\|", table, re.MULTILINE):
        status = int(row[0] or status)
        documented |= {(status, code) for code in re.findall(r"`(\w+)`", row[1])}
    assert documented - {(405, "method_not_allowed")} == {(kind.status, kind.code) for kind in error_classes(GatehouseError)}
