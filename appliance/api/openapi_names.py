"""Names in the OpenAPI document as generators of clients use them: for classes, methods and modules.

The framework derives the name of an operation from its path and that of a generic struct from the module of its argument
(`V1ModelsListModels`, `PageShape_appliance.api.shapes.KeyShape_`); here they are `listModels` and `KeyPage`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_REFERENCE = "#/components/schemas/"
_ANY = "Object"
"""The name of an argument that is not a struct."""
_FIRST = ("/v1/", "/admin/", "/health", "/metrics")
"""Paths in the order of the document; those without `/v1` come last."""


class Named(NamedTuple):
    """An operation of the document and what its name is made from."""

    operation: dict[str, Any]
    handler: str
    path: str


def name_operations(operations: Iterable[Named]) -> None:
    """Give every operation an `operationId`: its handler's name, `createChatCompletion`.

    Of two paths with the same handler, such as `/v1/models` and `/models`, the shorter one gets a suffix.
    """
    taken: set[str] = set()
    for operation, handler, path in sorted(operations, key=lambda each: (-len(each.path), each.path)):
        first, *others = handler.split("_")
        name = first + "".join(map(str.capitalize, others))
        if name in taken:
            name += "ShortPath"
        assert name not in taken, f"two operations have the name {name}: {path}"
        taken.add(name)
        operation["operationId"] = name


def in_order(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paths of a document in the order of `_FIRST`, alphabetically in each part."""

    def place(path: str) -> tuple[int, str]:
        return next((rank for rank, prefix in enumerate(_FIRST) if path.startswith(prefix)), len(_FIRST)), path

    return {path: paths[path] for path in sorted(paths, key=place)}


def rename_components(document: dict[str, Any]) -> dict[str, Any]:
    """Return `document` with the schemas under their public names (`component_name`), in alphabetical order."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    names = {name: component_name(name) for name in schemas}
    assert len(set(names.values())) == len(names), "two schemas have one name"
    renamed = {names[name]: {**schema, "title": names[name]} for name, schema in schemas.items()}
    components = {**document["components"], "schemas": dict(sorted(renamed.items()))}
    references = {f"{_REFERENCE}{old}": new for old, new in names.items()}
    return {key: _public(part, references) for key, part in {**document, "components": components}.items()}


def component_name(name: str) -> str:
    """Return the public name of a schema: `Key` for `KeyShape`, `KeyPage` for `PageShape_appliance.api.shapes.KeyShape_`."""
    generic, _, argument = name.partition("_")
    noun = argument.removesuffix("_").rpartition(".")[2]
    return (_ANY if noun == "Any" else re.sub("Shape$", "", noun)) + re.sub("Shape$", "", generic)


def _public(value: Any, names: dict[str, str]) -> Any:
    """Return `value` with the new references, and with the `items` that generators expect of an array of anything."""
    if isinstance(value, dict):
        public = {key: _REFERENCE + names[each] if key == "$ref" else _public(each, names) for key, each in value.items()}
        return {**public, "items": {}} if public.get("type") == "array" and "items" not in public else public
    if isinstance(value, list):
        return [_public(each, names) for each in value]
    return value
