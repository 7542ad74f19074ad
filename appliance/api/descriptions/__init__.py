"""What every field and parameter of the HTTP interface means, in the words of its reference (`/schema/openapi.json`).

One place instead of a comment at each struct: a field that occurs in many structs is described once, in the same words. Knows
the names of structs and fields, and nothing of what is in them. A test fails for a field without a description and for a
description without a field.
"""

from __future__ import annotations

import re
from typing import Any

from appliance.api.descriptions import administration, billing, inference, machine, organization

FIELDS = {**billing.FIELDS, **administration.FIELDS, **machine.FIELDS, **organization.FIELDS, **inference.FIELDS}
_AFFIXES = re.compile(r"(Shape|Body|Patch)$")


def describe_fields(schemas: dict[str, Any]) -> None:
    """Add its description to every field of `schemas`, the components of an OpenAPI document, that has none."""
    for name, schema in schemas.items():
        for field, described in schema.get("properties", {}).items():
            text = describe_field(name, field)
            if text is not None:
                described.setdefault("description", text)


def describe_field(schema: str, field: str) -> str | None:
    """Return what `field` of a component means, None without a description. That of the noun goes before a common one."""
    found = (FIELDS.get(key) for key in keys_of(schema, field))
    return next((text for text in found if text is not None), None)


def keys_of(schema: str, field: str) -> tuple[str, ...]:
    """Return the names under which a description is looked for. The noun of `NewKeyShape` is first `NewKey`, then `Key`."""
    noun = _AFFIXES.sub("", schema.partition("_")[0])
    return f"{noun}.{field}", f"{noun.removeprefix('New')}.{field}", field
