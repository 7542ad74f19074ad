"""The error tree: every public class has a code, a status, a docstring, and its place in the diagram."""

from __future__ import annotations

from appliance.base import errors
from appliance.base.errors import GatehouseError

STATUSES = {400, 401, 403, 404, 409, 413, 429, 500, 503}


def every(kind: type[GatehouseError]) -> list[type[GatehouseError]]:
    return [
        kind,
        *(deeper for child in kind.__subclasses__() if child.__module__ == errors.__name__ for deeper in every(child)),
    ]


def test_every_error_has_a_code_a_status_and_a_line() -> None:
    for kind in every(GatehouseError):
        assert kind.status in STATUSES, kind
        assert kind.code, kind
        assert kind.__dict__.get("__doc__"), kind


def test_the_drawing_is_the_tree() -> None:
    drawing = (errors.__doc__ or "").partition("\n\n")[2]
    drawn = {word.strip(",") for word in drawing.split() if word.strip(",").isalpha() and word.strip(",") != "xx"}
    assert drawn == {kind.__name__ for kind in every(GatehouseError)}
