"""Descriptions of all fields and parameters of the HTTP interface, for its reference (`/schema/openapi.json`).

They are kept here rather than at each struct, so that a field that occurs in many structs is described once. Knows the names of
structs and fields, not their types. A test fails for a field without a description and for a description without a field.
"""

from __future__ import annotations

import re
from typing import Any

from appliance.api.descriptions import administration, billing, inference, machine, organization

FIELDS = {**billing.FIELDS, **administration.FIELDS, **machine.FIELDS, **organization.FIELDS, **inference.FIELDS}
_SUFFIX = re.compile(r"(Shape|Body|Patch)$")


def describe_fields(schemas: dict[str, Any]) -> None:
    """Add descriptions to the fields of `schemas`, the components of an OpenAPI document, that have none."""
    for name, schema in schemas.items():
        for field, field_schema in schema.get("properties", {}).items():
            text = describe_field(name, field)
            if text is not None:
                field_schema.setdefault("description", text)


def describe_field(schema: str, field: str) -> str | None:
    """Return the description of `field` of the component `schema`, or None. `Noun.name` takes precedence over `name`."""
    candidates = (FIELDS.get(key) for key in lookup_keys(schema, field))
    return next((text for text in candidates if text is not None), None)


def lookup_keys(schema: str, field: str) -> tuple[str, ...]:
    """Return the keys under which to look a field up. For `NewKeyShape` the noun is `NewKey` first, then `Key`."""
    noun = _SUFFIX.sub("", schema.partition("_")[0])
    return f"{noun}.{field}", f"{noun.removeprefix('New')}.{field}", field
