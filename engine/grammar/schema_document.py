"""A JSON schema as a document: its draft, its schemas, and the targets of its references.

Drafts 4, 6, 7, 2019-09 and 2020-12; a schema that names none is read as 2020-12, with the older spellings of tuples,
`dependencies` and boolean exclusive bounds understood.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from engine.grammar.schema_nodes import PARAM, Node, json_type, refusal
from engine.grammar.spec import GrammarError

NODES_MAX = 50_000
_LITERALS = ("enum", "const", "default", "examples")  # keywords whose values are not schemas
_ARRAY_INDEX = re.compile("[0-9]{1,9}")  # an array index, as a reference writes it
_DRAFTS = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}
_SCHEMA_URI = re.compile(r"https?://json-schema\.org/(?:draft/)?(draft-0[467]|2019-09|2020-12)/(?:hyper-)?schema#?")


class Document:
    """A whole schema: its draft, its nodes, and the targets of its references."""

    def __init__(self, root: Any) -> None:
        self.draft = _draft(root)
        self._nodes: dict[int, Node] = {}
        self._booleans: dict[tuple[bool, str], Node] = {}
        self._kept_alive: list[Any] = []  # values created here, kept alive because nodes are identified by object identity
        self._schemas: dict[str, tuple[Any, str, str]] = {}
        self._id = "id" if self.draft == 4 else "$id"
        self._index(root)
        self.root = self.node(root, "", "#")

    def node(self, value: Any, base: str, path: str) -> Node:
        """The node of a schema value; the same for the same value."""
        index = len(self._nodes) + len(self._booleans)
        if isinstance(value, bool):
            return self._booleans.setdefault((value, path), Node(value, base, path, index))
        if not isinstance(value, dict):
            raise refusal(path, f"a schema must be an object or a boolean, not {json_type(value)}")
        if id(value) not in self._nodes:
            if len(self._nodes) >= NODES_MAX:
                raise GrammarError(PARAM, f"the schema has more than {NODES_MAX} schemas")
            self._nodes[id(value)] = Node(value, self._base_of(value, base), path, index)
        return self._nodes[id(value)]

    def rewritten_node(self, value: dict[str, Any], origin: Node) -> Node:
        """A node for keywords rewritten in another form than the document's."""
        self._kept_alive.append(value)
        return self.node(value, origin.base, origin.path)

    def const_node(self, value: dict[str, Any] | list[Any], path: str) -> Node:
        """A node that only the given value satisfies; each member has a constraint of its own."""
        if isinstance(value, dict):
            members = {name: {"enum": [inner]} for name, inner in value.items()}
            schema = {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}
        else:
            count = len(value)
            schema = {"type": "array", "items": [{"enum": [v]} for v in value], "minItems": count, "maxItems": count}
        self._kept_alive.append(schema)
        return self.node(schema, "", path)

    def resolve(self, reference: Any, node: Node) -> Node:
        """The target of a `$ref`. Raises `GrammarError` when it leaves the document or has no target."""
        if not isinstance(reference, str):
            raise refusal(node.path, "$ref must be a string")
        target = _resolve_uri(node.base, reference)
        document_uri, fragment = urldefrag(target)
        if target in self._schemas and not fragment.startswith("/"):
            return self.node(*self._schemas[target])
        if document_uri not in self._schemas:
            raise refusal(node.path, f"$ref to another document ({reference[:80]})")
        value, base, path = self._schemas[document_uri]
        if not fragment:
            return self.node(value, base, path)
        if not fragment.startswith("/"):
            raise refusal(node.path, f"$ref to {reference[:80]}, which is nowhere in the schema")
        for part in fragment[1:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            base = self._base_of(value, base)
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and _ARRAY_INDEX.fullmatch(key) and int(key) < len(value):
                value = value[int(key)]
            else:
                raise refusal(node.path, f"$ref to {reference[:80]}, which is nowhere in the schema")
            path = f"{path}/{part}"
        return self.node(value, base, path)

    def _base_of(self, value: Any, base: str) -> str:
        """The base URI inside `value`, which an identifier there changes."""
        if not isinstance(value, dict):
            return base
        identifier = value.get(self._id)
        if not isinstance(identifier, str) or identifier.startswith("#") or (self.draft in (4, 6, 7) and "$ref" in value):
            return base
        return urldefrag(_resolve_uri(base, identifier))[0]

    def _index(self, root: Any) -> None:
        """Record every schema that has its own name: the root, identifiers and anchors."""
        self._schemas[""] = (root, "", "#")
        worklist: list[tuple[Any, str, str]] = [(root, "", "#")]
        while worklist:
            value, base, path = worklist.pop()
            if isinstance(value, list):
                worklist.extend((v, base, f"{path}/{k}") for k, v in enumerate(value))
            if not isinstance(value, dict):
                continue
            inner_base, anchor = self._base_of(value, base), self._anchor_of(value)
            if inner_base != base or path == "#":
                self._schemas.setdefault(inner_base, (value, base, path))
            if anchor is not None:
                self._schemas.setdefault(f"{inner_base}#{anchor}", (value, base, path))
            worklist.extend((v, inner_base, f"{path}/{k}") for k, v in value.items() if k not in _LITERALS)

    def _anchor_of(self, schema: dict[str, Any]) -> str | None:
        """The name of a schema within its document: `$anchor`, before 2019 an identifier that begins with #."""
        if self.draft >= 2019:
            anchor = schema.get("$anchor")
            return anchor if isinstance(anchor, str) else None
        identifier = schema.get(self._id)
        return identifier[1:] if isinstance(identifier, str) and identifier.startswith("#") and len(identifier) > 1 else None


def _resolve_uri(base: str, reference: str) -> str:
    """A reference or schema identifier, resolved against `base`."""
    try:
        return urljoin(base, reference)
    except ValueError as error:
        raise GrammarError(PARAM, f"the schema has {reference[:80]!r} where a URI should be: {error}") from error


def _draft(root: Any) -> int:
    if not isinstance(root, dict) or "$schema" not in root:
        return 2020
    uri = root["$schema"]
    match = _SCHEMA_URI.fullmatch(uri) if isinstance(uri, str) else None
    if match is None:
        dialect = json.dumps(uri, default=str)[:80]
        raise refusal("#/$schema", f"the dialect {dialect}; drafts 4, 6, 7, 2019-09 and 2020-12 are known")
    return _DRAFTS[match.group(1)]
