"""The keywords of JSON Schema, draft by draft. Each becomes constraints, is an annotation, or is refused by name.

A keyword that no draft defines is an annotation, as the standard says, and so is `format` with a name it does not define.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from engine.grammar import formats
from engine.grammar.schema_document import Document
from engine.grammar.schema_nodes import TYPES, Constraint, Contains, Items, Members, Node, refusal
from engine.grammar.spec import GrammarError

_REFUSED = ("$dynamicRef", "$recursiveRef", "$vocabulary")


class Evaluated(NamedTuple):
    """What a schema, with those that it always includes, evaluates: properties by name and by pattern, and its first items."""

    names: set[str]
    patterns: set[str]
    num_items: int


class Keywords:
    """The constraints of the schemas of one document, each of which is read once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._constraints: dict[Node, tuple[Constraint, ...]] = {}

    def of(self, node: Node) -> tuple[Constraint, ...]:
        """The constraints of a schema: all must hold. Raises `GrammarError` naming a keyword that cannot be enforced, and for a
        schema that leads back to itself for the same value."""
        if node not in self._constraints:
            self._read_all(node)
        return self._constraints[node]

    def _read_all(self, node: Node) -> None:
        """Read a schema and those that it applies to the same value, without recursion: references may form a long chain."""
        inside = {node: self._read(node)}  # each is applied by the one before
        while inside:
            inner = next(next(reversed(inside.values())), None)
            if inner is None:
                inside.popitem()
            elif inner in inside:
                raise refusal(inner.path, "it applies to the same value again, without end")
            elif inner not in self._constraints:
                inside[inner] = self._read(inner)

    def _read(self, node: Node) -> Iterator[Node]:
        """Read one schema; the schemas that it applies to the same value."""
        self._constraints[node] = tuple(KeywordReader(self.document, node).read())
        return (inner for constraint in self._constraints[node] for inner in _applied_to_same_value(constraint))


def _applied_to_same_value(constraint: Constraint) -> Iterable[Node]:
    kind, value = constraint.kind, constraint.value
    if kind in ("all", "any", "one", "if"):
        nodes: Iterable[Node] = value
        return nodes
    if kind in ("not", "dependent"):
        return (value,) if kind == "not" else value[1:]
    return ()


class KeywordReader:
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
                raise self.refusal(keyword, f"the keyword {keyword}")
        ignored = "$ref" in self.schema and self.document.draft <= 7
        if not ignored:
            yield from self._members()
            yield from self._items()
        if "$ref" in self.schema:
            yield self.constraint("$ref", "all", [self.document.resolve(self.schema["$ref"], self.node)])
            if ignored:
                return  # these drafts say that its siblings are ignored
        for keyword, read in _READERS.items():
            if keyword in self.schema:
                yield from read(self, keyword, self.schema[keyword])
        yield from self._unevaluated()

    def constraint(self, keyword: str, kind: str, value: Any) -> Constraint:
        return Constraint(kind, value, f"{self.node.path}/{keyword}")

    def refusal(self, keyword: str, reason: str) -> GrammarError:
        return refusal(f"{self.node.path}/{keyword}", reason)

    def subschema(self, keyword: str, value: Any) -> Node:
        return self.document.node(value, self.node.base, f"{self.node.path}/{keyword}")

    def subschemas(self, keyword: str, value: Any) -> list[Node]:
        if not isinstance(value, list) or not value:
            raise self.refusal(keyword, f"{keyword} must be an array of at least one schema")
        return [self.subschema(f"{keyword}/{i}", inner) for i, inner in enumerate(value)]

    def mapping(self, keyword: str) -> dict[str, Any]:
        value = self.schema.get(keyword, {})
        if not isinstance(value, dict):
            raise self.refusal(keyword, f"{keyword} must be an object")
        return value

    def named_subschemas(self, keyword: str) -> dict[str, Node]:
        return {name: self.subschema(f"{keyword}/{_escaped(name)}", value) for name, value in self.mapping(keyword).items()}

    def _members(self) -> Iterator[Constraint]:
        keywords = ("properties", "patternProperties", "additionalProperties")
        if not any(keyword in self.schema for keyword in keywords):
            return
        others = self.schema.get("additionalProperties", True)
        node = None if others is True else self.subschema("additionalProperties", others)
        patterned = tuple(self.named_subschemas("patternProperties").items())
        yield self.constraint("properties", "members", Members(self.named_subschemas("properties"), patterned, node))

    def _positional(self) -> tuple[str, list[Any], str]:
        """The keyword of the items by position, their schemas, and the keyword of all later items."""
        keyword, others = "prefixItems", "items"
        if isinstance(self.schema.get("items"), list):
            keyword, others = "items", "additionalItems"
        is_known = keyword == "items" or self.document.draft >= 2020
        values = self.schema.get(keyword, []) if is_known else []
        if not isinstance(values, list):
            raise self.refusal(keyword, f"{keyword} must be an array of schemas")
        return keyword, values, others

    def _items(self) -> Iterator[Constraint]:
        positional, first, keyword = self._positional()
        nodes = tuple(self.subschema(f"{positional}/{i}", value) for i, value in enumerate(first))
        others = self.schema.get(keyword, True)
        rest = None if others is True else self.subschema(keyword, others)
        if nodes or rest is not None:
            yield self.constraint(keyword, "items", Items(nodes, rest))

    def _unevaluated(self) -> Iterator[Constraint]:
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            value = self.schema.get(keyword, True)
            if value is True or self.document.draft < 2019:
                continue
            evaluated = self._evaluated(keyword, self.node, set())
            if evaluated is None:
                continue
            rest = self.subschema(keyword, value)
            if keyword == "unevaluatedProperties":
                names = {name: self.subschema(keyword, True) for name in sorted(evaluated.names)}
                patterns = tuple((pattern, self.subschema(keyword, True)) for pattern in sorted(evaluated.patterns))
                yield self.constraint(keyword, "members", Members(names, patterns, rest, is_ordered=False))
            else:
                yield self.constraint(keyword, "items", Items((self.subschema(keyword, True),) * evaluated.num_items, rest))

    def _evaluated(self, keyword: str, node: Node, visited: set[int]) -> Evaluated | None:
        """None if the schema of `node` evaluates everything."""
        if node.index in visited or not isinstance(node.value, dict):
            return Evaluated(set(), set(), 0)
        visited.add(node.index)
        schema, inner_reader = node.value, KeywordReader(self.document, node)
        _, first, other_items = inner_reader._positional()
        others = "additionalProperties" if keyword == "unevaluatedProperties" else other_items
        if others in schema or (node is not self.node and keyword in schema):
            return None
        conditional = [w for w in ("anyOf", "oneOf", "if", "dependentSchemas", "not") if w in schema]
        if conditional or (keyword == "unevaluatedItems" and "contains" in schema):
            raise self.refusal(keyword, f"{keyword} beside {(conditional or ['contains'])[0]}")
        names, patterns = set(inner_reader.mapping("properties")), set(inner_reader.mapping("patternProperties"))
        count = len(first)
        included = [self.document.resolve(schema["$ref"], node)] if "$ref" in schema else []
        included += inner_reader.subschemas("allOf", schema["allOf"]) if "allOf" in schema else []
        for inner in included:
            of_inner = self._evaluated(keyword, inner, visited)
            if of_inner is None:
                return None
            names, patterns, count = names | of_inner.names, patterns | of_inner.patterns, max(count, of_inner.num_items)
        return Evaluated(names, patterns, count)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


_Read = Callable[[KeywordReader, str, Any], Iterator[Constraint]]


def _type(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    names = value if isinstance(value, list) else [value]
    unknown = [name for name in names if not isinstance(name, str) or name not in TYPES | {"integer"}]
    if not names:
        raise reader.refusal(keyword, "type must name at least one type")
    if unknown:
        raise reader.refusal(keyword, f"unknown type {json.dumps(unknown[0], default=str)}")
    yield reader.constraint(keyword, "type", frozenset(names))


def _enum(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    if keyword == "const" and reader.document.draft == 4:
        return  # not a keyword of draft 4
    if keyword == "enum" and not isinstance(value, list):
        raise reader.refusal(keyword, "enum must be an array")
    yield reader.constraint(keyword, "enum", value if keyword == "enum" else [value])


def _combinator(kind: str) -> _Read:
    def read(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
        yield reader.constraint(keyword, kind, reader.subschemas(keyword, value))

    return read


def _not(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    yield reader.constraint(keyword, "not", reader.subschema(keyword, value))


def _if(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    if reader.document.draft < 7 or not ({"then", "else"} & reader.schema.keys()):
        return
    branches = [reader.subschema(name, reader.schema.get(name, True)) for name in ("then", "else")]
    yield reader.constraint(keyword, "if", (reader.subschema(keyword, value), *branches))


def _number(reader: KeywordReader, keyword: str, value: Any) -> int | Fraction:
    if isinstance(value, bool) or not isinstance(value, int | Fraction):
        raise reader.refusal(keyword, f"{keyword} must be a number")
    return value


def _bound(side: str) -> _Read:
    """`minimum` and `maximum`; in draft 4 a boolean beside them makes the bound exclusive."""

    def read(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
        is_exclusive = reader.schema.get("exclusive" + keyword.capitalize()) is True
        yield reader.constraint(keyword, side, (Fraction(_number(reader, keyword, value)), is_exclusive))

    return read


def _exclusive_bound(side: str) -> _Read:
    def read(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
        if isinstance(value, bool):
            if reader.document.draft not in (4, 2020):
                raise reader.refusal(keyword, f"{keyword} must be a number")
            return
        yield reader.constraint(keyword, side, (Fraction(_number(reader, keyword, value)), True))

    return read


def _multiple(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    divisor = Fraction(_number(reader, keyword, value))
    if divisor <= 0:
        raise reader.refusal(keyword, "multipleOf must be above 0")
    yield reader.constraint(keyword, "multiple", divisor)


def count_of(value: Any) -> int | None:
    """A count as JSON writes it, `2.0` included; None if the value is not a count."""
    if isinstance(value, bool) or not isinstance(value, int | Fraction) or value < 0 or Fraction(value).denominator != 1:
        return None
    return int(value)


def _natural_number(reader: KeywordReader, keyword: str, value: Any) -> int:
    count = count_of(value)
    if count is None:
        raise reader.refusal(keyword, f"{keyword} must be a whole number of at least 0")
    return count


def _count(kind: str) -> _Read:
    def read(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
        yield reader.constraint(keyword, kind, _natural_number(reader, keyword, value))

    return read


def _text(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    if not isinstance(value, str):
        raise reader.refusal(keyword, f"{keyword} must be a string")
    if keyword == "format" and value in formats.REFUSED:
        raise reader.refusal(keyword, f"the format {value}")
    yield reader.constraint(keyword, keyword, value)


def _string_array(reader: KeywordReader, keyword: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise reader.refusal(keyword, f"{keyword} must hold arrays of strings")
    return tuple(dict.fromkeys(value))


def _required(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    for name in _string_array(reader, keyword, value):
        yield reader.constraint(keyword, "required", name)


def _property_names(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    if reader.document.draft > 4:
        yield reader.constraint(keyword, "names", reader.subschema(keyword, value))


def _dependent(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    del value
    if keyword != "dependencies" and reader.document.draft < 2019:
        return
    for name, inner in reader.mapping(keyword).items():
        if isinstance(inner, list):
            needed = {"required": list(_string_array(reader, keyword, inner))}
            yield reader.constraint(keyword, "dependent", (name, reader.document.rewritten_node(needed, reader.node)))
        else:
            yield reader.constraint(keyword, "dependent", (name, reader.subschema(f"{keyword}/{_escaped(name)}", inner)))


def _contains(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    if reader.document.draft < 6:
        return
    low, high = 1, None
    if reader.document.draft >= 2019:
        low = _natural_number(reader, "minContains", reader.schema.get("minContains", low))
        high = _natural_number(reader, "maxContains", reader.schema["maxContains"]) if "maxContains" in reader.schema else None
    yield reader.constraint(keyword, "contains", Contains(reader.subschema(keyword, value), low, high))


def _unique(reader: KeywordReader, keyword: str, value: Any) -> Iterator[Constraint]:
    if value is True:
        yield reader.constraint(keyword, "unique", None)
    elif value is not False:
        raise reader.refusal(keyword, "uniqueItems must be a boolean")


_READERS: dict[str, _Read] = {
    "type": _type,
    "enum": _enum,
    "const": _enum,
    "allOf": _combinator("all"),
    "anyOf": _combinator("any"),
    "oneOf": _combinator("one"),
    "not": _not,
    "if": _if,
    "minimum": _bound("low"),
    "maximum": _bound("high"),
    "exclusiveMinimum": _exclusive_bound("low"),
    "exclusiveMaximum": _exclusive_bound("high"),
    "multipleOf": _multiple,
    "minLength": _count("min_length"),
    "maxLength": _count("max_length"),
    "pattern": _text,
    "format": _text,
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
