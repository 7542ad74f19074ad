"""Names of operations and schemas in the OpenAPI document, from which client generators make methods and classes.

The framework names an operation after its path and a generic struct after the module of its argument (`V1ModelsListModels`,
`PageShape_appliance.api.shapes.KeyShape_`); here they become `listModels` and `KeyPage`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

_REFERENCE = "#/components/schemas/"
_UNTYPED = "Object"
"""Replaces a generic argument that is not a struct."""
_PREFIXES = ("/v1/", "/admin/", "/health", "/metrics")
"""The order of paths in the document; paths with none of these prefixes (those without `/v1`) come last."""


class Operation(NamedTuple):
    """An operation of the document with the name of its handler and its path."""

    schema: dict[str, Any]
    handler: str
    path: str


def name_operations(operations: Iterable[Operation]) -> None:
    """Set the `operationId` of each operation to its handler's name in camel case, such as `createChatCompletion`.

    Of two paths with the same handler, such as `/v1/models` and `/models`, the shorter one gets a suffix.
    """
    taken: set[str] = set()
    for schema, handler, path in sorted(operations, key=lambda operation: (-len(operation.path), operation.path)):
        first, *others = handler.split("_")
        name = first + "".join(map(str.capitalize, others))
        if name in taken:
            name += "ShortPath"
        assert name not in taken, f"two operations have the name {name}: {path}"
        taken.add(name)
        schema["operationId"] = name


def sort_paths(paths: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paths of a document in the order of `_PREFIXES`, and alphabetically for each prefix."""

    def rank(path: str) -> tuple[int, str]:
        return next((index for index, prefix in enumerate(_PREFIXES) if path.startswith(prefix)), len(_PREFIXES)), path

    return {path: paths[path] for path in sorted(paths, key=rank)}


def rename_components(document: dict[str, Any]) -> dict[str, Any]:
    """Return `document` with its schemas renamed by `component_name` and sorted alphabetically."""
    schemas: dict[str, Any] = document["components"]["schemas"]
    names = {name: component_name(name) for name in schemas}
    assert len(set(names.values())) == len(names), "two schemas have one name"
    renamed = {names[name]: {**schema, "title": names[name]} for name, schema in schemas.items()}
    components = {**document["components"], "schemas": dict(sorted(renamed.items()))}
    references = {f"{_REFERENCE}{old}": new for old, new in names.items()}
    return {key: _rewrite(part, references) for key, part in {**document, "components": components}.items()}


def component_name(name: str) -> str:
    """Return the public name of a schema: `Key` for `KeyShape`, `KeyPage` for `PageShape_appliance.api.shapes.KeyShape_`."""
    generic, _, argument = name.partition("_")
    noun = argument.removesuffix("_").rpartition(".")[2]
    return (_UNTYPED if noun == "Any" else re.sub("Shape$", "", noun)) + re.sub("Shape$", "", generic)


def _rewrite(node: Any, names: dict[str, str]) -> Any:
    """Return `node` with renamed references, and with the `items` that generators require, even for untyped arrays."""
    if isinstance(node, dict):
        renamed = {key: _REFERENCE + names[value] if key == "$ref" else _rewrite(value, names) for key, value in node.items()}
        return {**renamed, "items": {}} if renamed.get("type") == "array" and "items" not in renamed else renamed
    if isinstance(node, list):
        return [_rewrite(item, names) for item in node]
    return node
