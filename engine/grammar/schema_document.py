"""A JSON schema read into constraints: every keyword of its draft is here, an annotation, or refused by name with its place.

Drafts 4, 6, 7, 2019-09 and 2020-12; a schema that names none is read as 2020-12, with the older spellings of tuples,
`dependencies` and boolean exclusive bounds understood. A keyword that no draft defines is an annotation, as the standard says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from engine.grammar.spec import GrammarError

PARAM = "guided_json"
TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
NODES_MAX = 50_000
NUMBER_EXPONENT_MAX = 400
_DRAFTS = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}
_SCHEMA_URI = re.compile(r"https?://json-schema\.org/(?:draft/)?(draft-0[467]|2019-09|2020-12)/(?:hyper-)?schema#?")
_REFUSED = ("$dynamicRef", "$recursiveRef", "$vocabulary")


def refusal(path: str, what: str) -> GrammarError:
    return GrammarError(PARAM, f"guided_json cannot be enforced at {path or '#'}: {what}")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A schema of the document. Compared by identity; `index` is its place in the order of reading."""

    value: Any
    base: str
    path: str
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class Constraint:
    """One keyword, or keywords that only mean something together. `kind` says what `value` holds."""

    kind: str
    value: Any
    path: str


@dataclass(frozen=True, slots=True)
class Members:
    """`properties`, `patternProperties` and `additionalProperties` of one schema; None constrains nothing."""

    named: dict[str, Node]
    patterned: tuple[tuple[str, Node], ...]
    others: Node | None


@dataclass(frozen=True, slots=True)
class Items:
    """The schemas of an array by position, and of all that come after them."""

    first: tuple[Node, ...]
    others: Node | None


@dataclass(frozen=True, slots=True)
class Contains:
    """Between `low` and `high` items satisfy `node`, or do not satisfy it when `holds` is False."""

    node: Node
    low: int
    high: int | None
    holds: bool = True


def parse(text: str) -> Any:
    """JSON with exact numbers: integers as int, others as Fraction. Raises `GrammarError`."""
    try:
        return json.loads(text, parse_float=_fraction)
    except ValueError as error:
        raise GrammarError(PARAM, f"guided_json is not JSON: {error}") from error


def _fraction(digits: str) -> int | Fraction:
    try:
        value = Decimal(digits)
    except InvalidOperation as error:
        raise GrammarError(PARAM, f"guided_json holds the number {digits[:40]}, which is beyond every limit") from error
    if value and abs(value.adjusted()) > NUMBER_EXPONENT_MAX:
        raise GrammarError(PARAM, f"guided_json holds the number {digits[:40]}: exponents go to {NUMBER_EXPONENT_MAX}")
    return Fraction(value)


class Document:
    """A whole schema: its draft, its nodes, and where its references lead."""

    def __init__(self, root: Any) -> None:
        self.draft = _draft(root)
        self._nodes: dict[int, Node] = {}
        self._booleans: dict[tuple[bool, str], Node] = {}
        self._kept: list[Any] = []  # values made here, kept alive because nodes are known by identity
        self._places: dict[str, tuple[Any, str, str]] = {}
        self._constraints: dict[int, tuple[Constraint, ...]] = {}
        self._id = "id" if self.draft == 4 else "$id"
        self._index(root, "", "")
        self.root = self.node(root, "", "#")

    def node(self, value: Any, base: str, path: str) -> Node:
        """The node of a schema value; the same for the same value."""
        if isinstance(value, bool):
            return self._booleans.setdefault((value, path), Node(value, base, path, len(self._nodes) + len(self._booleans)))
        if not isinstance(value, dict):
            raise refusal(path, f"a schema must be an object or a boolean, not {_json_type(value)}")
        if id(value) not in self._nodes:
            if len(self._nodes) >= NODES_MAX:
                raise GrammarError(PARAM, f"guided_json has more than {NODES_MAX} schemas")
            self._nodes[id(value)] = Node(value, self._base_of(value, base), path, len(self._nodes) + len(self._booleans))
        return self._nodes[id(value)]

    def made(self, value: dict[str, Any], like: Node) -> Node:
        """A node for keywords that stand in the document in another form."""
        self._kept.append(value)
        return self.node(value, like.base, like.path)

    def only(self, value: Any, path: str) -> Node:
        """A node that the given value alone satisfies, said of each of its members."""
        if isinstance(value, dict) and value:
            members = {name: self._only(inner) for name, inner in value.items()}
            schema = {"type": "object", "properties": members, "required": list(value), "additionalProperties": False}
        elif isinstance(value, list) and value:
            count = len(value)
            schema = {"type": "array", "items": [self._only(v) for v in value], "minItems": count, "maxItems": count}
        else:
            schema = {"enum": [value]}
        self._kept.append(schema)
        return self.node(schema, "", path)

    def _only(self, value: Any) -> dict[str, Any]:
        return {"enum": [value]}

    def constraints(self, node: Node) -> tuple[Constraint, ...]:
        """What a node asks for: all must hold. Raises `GrammarError` naming a keyword that cannot be enforced."""
        if node.index not in self._constraints:
            self._constraints[node.index] = tuple(_Reader(self, node).read())
        return self._constraints[node.index]

    def resolve(self, reference: Any, node: Node) -> Node:
        """Where a `$ref` leads. Raises `GrammarError` when it leaves the document or leads nowhere."""
        if not isinstance(reference, str):
            raise refusal(node.path, "$ref must be a string")
        target = urljoin(node.base, reference)
        place, fragment = urldefrag(target)
        if target in self._places and not fragment.startswith("/"):
            return self.node(*self._places[target])
        if place not in self._places:
            raise refusal(node.path, f"$ref to another document ({reference[:80]})")
        value, base, path = self._places[place]
        if not fragment:
            return self.node(value, base, path)
        if not fragment.startswith("/"):
            raise refusal(node.path, f"$ref to {reference[:80]}, which is nowhere in the schema")
        for part in fragment[1:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            base = self._base_of(value, base)
            if isinstance(value, dict) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise refusal(node.path, f"$ref to {reference[:80]}, which is nowhere in the schema")
            path = f"{path}/{part}"
        return self.node(value, base, path)

    def _base_of(self, value: Any, base: str) -> str:
        """The base URI inside `value`, which an identifier in it changes."""
        if not isinstance(value, dict):
            return base
        own = value.get(self._id)
        if not isinstance(own, str) or own.startswith("#") or (self.draft in (4, 6, 7) and "$ref" in value):
            return base
        return urldefrag(urljoin(base, own))[0]

    def _index(self, root: Any, base: str, path: str) -> None:
        """Remember every schema that has a name of its own: the root, identifiers and anchors."""
        self._places.setdefault("", (root, base, "#"))
        waiting = [(root, base, "#")]
        while waiting:
            value, base, path = waiting.pop()
            if isinstance(value, dict):
                inner = self._base_of(value, base)
                if inner != base or path == "#":
                    self._places.setdefault(inner, (value, base, path))
                anchors = [value.get("$anchor")] if self.draft >= 2019 else []
                own = value.get(self._id)
                if isinstance(own, str) and own.startswith("#") and len(own) > 1 and self.draft < 2019:
                    anchors.append(own[1:])
                for anchor in anchors:
                    if isinstance(anchor, str):
                        self._places.setdefault(f"{inner}#{anchor}", (value, base, path))
                literal = ("enum", "const", "default", "examples")
                waiting.extend((v, inner, f"{path}/{k}") for k, v in value.items() if k not in literal)
            elif isinstance(value, list):
                waiting.extend((v, base, f"{path}/{k}") for k, v in enumerate(value))


def _draft(root: Any) -> int:
    uri = root.get("$schema") if isinstance(root, dict) else None
    if uri is None:
        return 2020
    found = _SCHEMA_URI.fullmatch(uri) if isinstance(uri, str) else None
    if found is None:
        raise refusal("#/$schema", f"the dialect {str(uri)[:80]!r}; drafts 4, 6, 7, 2019-09 and 2020-12 are known")
    return _DRAFTS[found.group(1)]


def _json_type(value: Any) -> str:
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class _Reader:
    """Reads the keywords of one schema object."""

    def __init__(self, document: Document, node: Node) -> None:
        self.document = document
        self.node = node
        self.schema: dict[str, Any] = {} if isinstance(node.value, bool) else node.value

    def read(self) -> Iterator[Constraint]:
        if self.node.value is False:
            yield Constraint("never", None, self.node.path)
            return
        for keyword in _REFUSED:
            if keyword in self.schema:
                raise self.refuse(keyword, f"the keyword {keyword}")
        ignored = "$ref" in self.schema and self.document.draft <= 7
        if not ignored:
            yield from self._members()
            yield from self._items()
        if "$ref" in self.schema:
            yield self.made("$ref", "all", [self.document.resolve(self.schema["$ref"], self.node)])
            if ignored:
                return  # its siblings are ignored, say these drafts
        for keyword, read in _READERS.items():
            if keyword in self.schema:
                yield from read(self, keyword, self.schema[keyword])
        yield from self._unevaluated()

    def made(self, keyword: str, kind: str, value: Any) -> Constraint:
        return Constraint(kind, value, f"{self.node.path}/{keyword}")

    def refuse(self, keyword: str, what: str) -> GrammarError:
        return refusal(f"{self.node.path}/{keyword}", what)

    def sub(self, keyword: str, value: Any) -> Node:
        return self.document.node(value, self.node.base, f"{self.node.path}/{keyword}")

    def subs(self, keyword: str, value: Any) -> list[Node]:
        if not isinstance(value, list) or not value:
            raise self.refuse(keyword, f"{keyword} must be an array of at least one schema")
        return [self.sub(f"{keyword}/{i}", inner) for i, inner in enumerate(value)]

    def mapping(self, keyword: str) -> dict[str, Any]:
        value = self.schema.get(keyword, {})
        if not isinstance(value, dict):
            raise self.refuse(keyword, f"{keyword} must be an object")
        return value

    def named(self, keyword: str) -> dict[str, Node]:
        return {name: self.sub(f"{keyword}/{_escaped(name)}", value) for name, value in self.mapping(keyword).items()}

    def _members(self) -> Iterator[Constraint]:
        keywords = ("properties", "patternProperties", "additionalProperties")
        if not any(keyword in self.schema for keyword in keywords):
            return
        others = self.schema.get("additionalProperties", True)
        node = None if others is True else self.sub("additionalProperties", others)
        patterned = tuple(self.named("patternProperties").items())
        yield self.made("properties", "members", Members(self.named("properties"), patterned, node))

    def _items(self) -> Iterator[Constraint]:
        first, others = self.schema.get("prefixItems"), self.schema.get("items")
        keyword = "items"
        if isinstance(others, list):
            first, others, keyword = others, self.schema.get("additionalItems"), "additionalItems"
        elif first is not None and self.document.draft < 2020:
            first = None
        if first is not None and not isinstance(first, list):
            raise self.refuse("prefixItems", "prefixItems must be an array of schemas")
        nodes = tuple(self.sub(f"prefixItems/{i}", value) for i, value in enumerate(first or []))
        rest = None if others is None or others is True else self.sub(keyword, others)
        if nodes or rest is not None:
            yield self.made(keyword, "items", Items(nodes, rest))

    def _unevaluated(self) -> Iterator[Constraint]:
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            value = self.schema.get(keyword, True)
            if value is True or self.document.draft < 2019:
                continue
            seen = self._evaluated(keyword, self.node, set())
            if seen is None:
                continue
            rest = self.sub(keyword, value)
            if keyword == "unevaluatedProperties":
                names = {name: self.sub(keyword, True) for name in seen[0]}
                patterns = tuple((pattern, self.sub(keyword, True)) for pattern in seen[1])
                yield self.made(keyword, "members", Members(names, patterns, rest))
            else:
                yield self.made(keyword, "items", Items((self.sub(keyword, True),) * seen[2], rest))

    def _evaluated(self, keyword: str, node: Node, visited: set[int]) -> tuple[set[str], set[str], int] | None:
        """Names, patterns and number of items that a schema and those it includes for certain look at; None for all of them."""
        names, patterns, count = set[str](), set[str](), 0
        if node.index in visited or not isinstance(node.value, dict):
            return names, patterns, count
        visited.add(node.index)
        schema = node.value
        whole = ("additionalProperties",) if keyword == "unevaluatedProperties" else ("items", "additionalItems")
        if any(word in schema and not isinstance(schema[word], list) for word in whole):
            return None
        if node is not self.node and keyword in schema:
            return None
        uncertain = [w for w in ("anyOf", "oneOf", "if", "dependentSchemas", "not") if w in schema]
        if uncertain or (keyword == "unevaluatedItems" and "contains" in schema):
            raise self.refuse(keyword, f"{keyword} beside {(uncertain or ['contains'])[0]}")
        names.update(schema.get("properties", {}))
        patterns.update(schema.get("patternProperties", {}))
        positional = schema.get("prefixItems", schema.get("items", []))
        count = len(positional) if isinstance(positional, list) else 0
        included = [self.document.resolve(schema["$ref"], node)] if "$ref" in schema else []
        included += [self.document.node(v, node.base, f"{node.path}/allOf/{i}") for i, v in enumerate(schema.get("allOf", []))]
        for inner in included:
            found = self._evaluated(keyword, inner, visited)
            if found is None:
                return None
            names, patterns, count = names | found[0], patterns | found[1], max(count, found[2])
        return names, patterns, count


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_Read = Callable[[_Reader, str, Any], Iterator[Constraint]]


def _type(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    names = value if isinstance(value, list) else [value]
    unknown = [name for name in names if not isinstance(name, str) or name not in TYPES | {"integer"}]
    if unknown or not names:
        raise reader.refuse(keyword, f"the type {json.dumps(unknown[0] if unknown else names, default=str)}")
    yield reader.made(keyword, "type", frozenset(names))


def _enum(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    if keyword == "const" and reader.document.draft == 4:
        return  # no keyword of draft 4
    if keyword == "enum" and not isinstance(value, list):
        raise reader.refuse(keyword, "enum must be an array")
    yield reader.made(keyword, "enum", value if keyword == "enum" else [value])


def _all_of(kind: str) -> _Read:
    def read(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
        yield reader.made(keyword, kind, reader.subs(keyword, value))

    return read


def _not(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    yield reader.made(keyword, "not", reader.sub(keyword, value))


def _if(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    if reader.document.draft < 7 or not ({"then", "else"} & reader.schema.keys()):
        return
    branches = [reader.sub(name, reader.schema.get(name, True)) for name in ("then", "else")]
    yield reader.made(keyword, "if", (reader.sub(keyword, value), *branches))


def _number(reader: _Reader, keyword: str, value: Any) -> int | Fraction:
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise reader.refuse(keyword, f"{keyword} must be a number")
    return value


def _bound(side: str) -> _Read:
    """`minimum` and `maximum`; in draft 4 a boolean beside them opens the bound."""

    def read(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
        is_open = reader.schema.get("exclusive" + keyword.capitalize()) is True
        yield reader.made(keyword, side, (Fraction(_number(reader, keyword, value)), is_open))

    return read


def _open_bound(side: str) -> _Read:
    def read(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
        if isinstance(value, bool):
            if reader.document.draft not in (4, 2020):
                raise reader.refuse(keyword, f"{keyword} must be a number")
            return
        yield reader.made(keyword, side, (Fraction(_number(reader, keyword, value)), True))

    return read


def _multiple(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    divisor = Fraction(_number(reader, keyword, value))
    if divisor <= 0:
        raise reader.refuse(keyword, "multipleOf must be above 0")
    yield reader.made(keyword, "multiple", divisor)


def count_of(value: Any) -> int | None:
    """A count as JSON writes it, `2.0` included; None when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | Fraction) or value < 0 or Fraction(value).denominator != 1:
        return None
    return int(value)


def _count(kind: str) -> _Read:
    def read(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
        count = count_of(value)
        if count is None:
            raise reader.refuse(keyword, f"{keyword} must be a whole number of at least 0")
        yield reader.made(keyword, kind, count)

    return read


def _text(kind: str) -> _Read:
    def read(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
        if not isinstance(value, str):
            raise reader.refuse(keyword, f"{keyword} must be a string")
        yield reader.made(keyword, kind, value)

    return read


def _names_in(reader: _Reader, keyword: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise reader.refuse(keyword, f"{keyword} must hold arrays of strings")
    return tuple(dict.fromkeys(value))


def _required(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    for name in _names_in(reader, keyword, value):
        yield reader.made(keyword, "required", name)


def _property_names(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    if reader.document.draft > 4:
        yield reader.made(keyword, "names", reader.sub(keyword, value))


def _dependent(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    del value
    if keyword != "dependencies" and reader.document.draft < 2019:
        return
    for name, inner in reader.mapping(keyword).items():
        if isinstance(inner, list):
            needed = {"required": list(_names_in(reader, keyword, inner))}
            yield reader.made(keyword, "dependent", (name, reader.document.made(needed, reader.node)))
        else:
            yield reader.made(keyword, "dependent", (name, reader.sub(f"{keyword}/{_escaped(name)}", inner)))


def _contains(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    draft = reader.document.draft
    if draft < 6:
        return
    counts = [count_of(reader.schema[k]) if k in reader.schema and draft >= 2019 else d for k, d in _CONTAINED.items()]
    yield reader.made(keyword, "contains", Contains(reader.sub(keyword, value), counts[0] or 0, counts[1]))


_CONTAINED: dict[str, int | None] = {"minContains": 1, "maxContains": None}


def _unique(reader: _Reader, keyword: str, value: Any) -> Iterator[Constraint]:
    if value is True:
        yield reader.made(keyword, "unique", None)
    elif value is not False:
        raise reader.refuse(keyword, "uniqueItems must be a boolean")


_READERS: dict[str, _Read] = {
    "type": _type,
    "enum": _enum,
    "const": _enum,
    "allOf": _all_of("all"),
    "anyOf": _all_of("any"),
    "oneOf": _all_of("one"),
    "not": _not,
    "if": _if,
    "minimum": _bound("low"),
    "maximum": _bound("high"),
    "exclusiveMinimum": _open_bound("low"),
    "exclusiveMaximum": _open_bound("high"),
    "multipleOf": _multiple,
    "minLength": _count("min_length"),
    "maxLength": _count("max_length"),
    "pattern": _text("pattern"),
    "format": _text("format"),
    "required": _required,
    "minProperties": _count("min_members"),
    "maxProperties": _count("max_members"),
    "propertyNames": _property_names,
    "dependencies": _dependent,
    "dependentRequired": _dependent,
    "dependentSchemas": _dependent,
    "minItems": _count("min_items"),
    "maxItems": _count("max_items"),
    "contains": _contains,
    "uniqueItems": _unique,
}
