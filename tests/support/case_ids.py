"""Readable ids for parametrised tests whose values are dictionaries, dataclasses or other objects."""

from __future__ import annotations

import dataclasses

ID_CHARS_MAX = 60


def case_id(value: object) -> str:
    """Return the beginning of a value's text, for `ids=`; of a dataclass, the fields that are not None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        text = ", ".join(f"{name}={each}" for name, each in fields.items() if each is not None)
    else:
        text = value if isinstance(value, str) and value.isascii() else ascii(value)
    return text[:ID_CHARS_MAX]
