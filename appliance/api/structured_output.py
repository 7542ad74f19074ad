"""Converts `response_format`, `guided_*` and `structured_outputs` of a request to the single constraint that the engine takes.

Only the structure of these fields is checked here. Whether a schema can be enforced, the engine finds out when it compiles it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from appliance.api.schemas import FORMATS, SCHEMA_NAME, ChatCompletionRequest, ResponseFormat, StructuredOutputs
from appliance.base.errors import InvalidValue, UnsupportedParameter

GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar")
STRUCTURED_OPTIONS = ("structural_tag", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
ANY_OBJECT: dict[str, Any] = {"type": "object"}
_NAME = re.compile(SCHEMA_NAME)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the output: the engine's field for it, its value, and the field in which the client sent it."""

    engine_field: str
    value: Any
    client_field: str


def find_constraint(body: ChatCompletionRequest) -> Constraint | None:
    """Return the constraint on the output, or None. Raises InvalidValue or UnsupportedParameter, naming the field."""
    schema = _schema_of_format(body.response_format)
    found = [] if schema is None else [Constraint("guided_json", schema, "response_format")]
    found += [Constraint(name, getattr(body, name), name) for name in GUIDED_FIELDS if getattr(body, name) is not None]
    found += _structured_constraints(body.structured_outputs)
    if len(found) > 1:
        first, second = found[0].client_field, found[1].client_field
        raise InvalidValue(f"{second} cannot be combined with {first}: the output can have only one constraint", param=second)
    return found[0] if found else None


def _schema_of_format(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None:
        return None
    kind, given = response_format.type, response_format.json_schema
    if kind not in FORMATS:
        raise InvalidValue(f"response_format.type must be one of {', '.join(FORMATS)}", param="response_format.type")
    if kind != "json_schema":
        if given is not None:
            raise InvalidValue(
                f"response_format.json_schema cannot be used with type {kind}", param="response_format.json_schema"
            )
        return ANY_OBJECT if kind == "json_object" else None
    if given is None:
        raise InvalidValue("response_format.json_schema is missing", param="response_format.json_schema")
    if not _NAME.fullmatch(given.name):
        raise InvalidValue(
            "response_format.json_schema.name must have 1 to 64 letters, digits, underscores or dashes",
            param="response_format.json_schema.name",
        )
    return ANY_OBJECT if given.schema is None else given.schema


def _structured_constraints(outputs: StructuredOutputs | None) -> list[Constraint]:
    if outputs is None:
        return []
    for name in STRUCTURED_OPTIONS:
        if getattr(outputs, name) not in (None, False):
            field = f"structured_outputs.{name}"
            raise UnsupportedParameter(f"{field} is not supported by this version", param=field)
    given = {kind: getattr(outputs, kind) for kind in STRUCTURED_KINDS}
    found = [
        Constraint(f"guided_{kind}", value, f"structured_outputs.{kind}") for kind, value in given.items() if value is not None
    ]
    if outputs.json_object:
        found.append(Constraint("guided_json", ANY_OBJECT, "structured_outputs.json_object"))
    if not found:
        kinds = ", ".join((*STRUCTURED_KINDS, "json_object"))
        raise InvalidValue(f"structured_outputs needs one of {kinds}", param="structured_outputs")
    return found
