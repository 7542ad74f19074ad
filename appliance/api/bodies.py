"""Decodes request bodies. Every fault becomes a 400 that names the field, with our own message instead of the decoder's."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from appliance.api.json_structure import check_structure
from appliance.base.errors import InvalidValue, UnknownParameter
from appliance.base.interpreter import without_collections
from appliance.base.texts import did_you_mean
from appliance.serving.fair_semaphore import FairSemaphore

T = TypeVar("T")
OMITTED = msgspec.UNSET
Omittable = msgspec.UnsetType
"""The type of a field that an update omits, as opposed to a field that it sets to null."""

_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")  # of a path: the name of a field, or an index like `[0]` or `[...]`
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_NOT_OF_TYPE = re.compile(r"Expected `(?P<types>[a-z |]+)`, got")
_BEYOND_NUMBERS = {
    "Number out of range": "a number must be between -1.8e308 and 1.8e308",
    "Integer value out of range": "a whole number must have at most 4300 characters",
}
_WORDS = {
    "array": ("a list",), "bool": ("true", "false"), "float": ("a number",), "int": ("a whole number",), "null": ("null",),
    "object": ("an object",), "str": ("a string",),
}  # fmt: skip
# Possessive quantifiers keep no state for backtracking, which would otherwise grow with each character of a string.
_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]')
_DEPTH_SUSPICIOUS = 200  # less than the decoder's limit, and more than any real request has
_SEARCHED_BYTES, _SEARCHED_TOKENS = 1 << 20, 20_000  # some 10 ms at most: this search blocks all other clients
_OPENINGS = {
    b"\x1f\x8b": "it is compressed; send it uncompressed",
    b"\xef\xbb\xbf": "it begins with a byte order mark",
}
SHORT_BODY_BYTES_MAX = 16 * 1024  # decoded in two milliseconds at most, whatever it contains


def decode_body(body: bytes, body_type: type[T]) -> T:
    """Return `body` (JSON) as `body_type`. Raises UnknownParameter or InvalidValue."""
    try:
        with without_collections():
            return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), body_type) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not body.strip():
            raise InvalidValue("the body is empty; send a JSON object") from error
        raise InvalidValue(
            f"the body is not valid UTF-8 JSON: {_json_fault(body, error)}", param=_field_with_surrogate(body)
        ) from error
    except RecursionError as error:
        name = _deepest_field(body)
        raise InvalidValue(f"{name or 'the body'} is nested too deeply", param=name) from error


async def read_in_turn(body: bytes, read: Callable[[bytes], T], *, semaphore: FairSemaphore, tenant_id: str) -> T:
    """Return `read(body)`. Long bodies first pass `check_structure` and are read one at a time; tenants take turns.

    Raises Overloaded if too many wait, and what `check_structure` and `read` raise.
    """
    if len(body) <= SHORT_BODY_BYTES_MAX:
        return read(body)
    await semaphore.acquire(tenant_id)
    try:
        await check_structure(body)
        return read(body)
    finally:
        asyncio.get_running_loop().call_soon(semaphore.release)


def given_fields(body: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that the body of an update contains."""
    return {name: value for name, value in msgspec.structs.asdict(body).items() if value is not OMITTED}


def _json_fault(body: bytes, error: Exception) -> str:
    for opening, fault in _OPENINGS.items():
        if body.startswith(opening):
            return fault
    if isinstance(error, UnicodeDecodeError):
        return "a text has bytes that are not UTF-8"
    if _SURROGATE.search(body):
        return "it may have an unpaired surrogate escape (\\ud800 to \\udfff); they must come in pairs"
    return str(error).removeprefix("JSON is malformed: ")


def _field_with_surrogate(body: bytes) -> str | None:
    """Return the field that contains an unpaired surrogate, or None. Other faults of JSON cannot be attributed to a field."""
    if not _SURROGATE.search(body):
        return None
    try:
        fields = json.loads(body)  # accepts unpaired surrogates, unlike msgspec
    except (RecursionError, ValueError):
        return None
    names = fields if isinstance(fields, dict) else {}
    return next((name for name, value in names.items() if not _is_text(name) or not _is_text(value)), None)


def _deepest_field(body: bytes) -> str | None:
    """Return the most deeply nested field of the body, if a search of limited length finds it."""
    if body[:_SEARCHED_BYTES].lstrip()[:1] != b"{":
        return None
    depth, last_string = 0, b""
    deepest, name = _DEPTH_SUSPICIOUS, None
    for match in islice(_STRUCTURE.finditer(body, 0, _SEARCHED_BYTES), _SEARCHED_TOKENS):
        token = match[0]
        if token in b"[{":
            depth += 1
        elif token in b"]}":
            depth -= 1
        elif depth == 1:
            last_string = token  # at this level the last string before a value is the field's name
        if depth > deepest:
            deepest, name = depth, last_string
    try:
        return None if name is None else json.loads(name) or None
    except ValueError:
        return None


def _is_text(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _validation_error(message: str, body_type: type[Any]) -> InvalidValue | UnknownParameter:
    """Return the error for a `message` of the decoder about a body of this type."""
    location = _PATH.search(message)
    path = location.group("path") if location else ""
    subject = f"each value of {path.removesuffix('[...]')}" if path.endswith("[...]") else path
    fields_path, path = path, path.replace("[...]", "")
    problem = message[: location.start()] if location else message
    unknown, missing = _UNKNOWN.match(problem), _MISSING.match(problem)
    if unknown:
        name = _join_path(path, unknown.group("name"))
        hint = did_you_mean(unknown.group("name"), _fields_at(fields_path, body_type))
        return UnknownParameter(f"unknown parameter: {name}{hint}", param=name)
    if missing:
        name = _join_path(path, missing.group("name"))
        return InvalidValue(f"missing parameter: {name}", param=name)
    if problem in _BEYOND_NUMBERS:
        return InvalidValue(f"{subject or 'the body'}: {_BEYOND_NUMBERS[problem]}", param=path or None)
    expected = _NOT_OF_TYPE.match(problem)
    if expected:
        return InvalidValue(f"{subject or 'the body'} must be {_in_words(expected.group('types'))}", param=path or None)
    return InvalidValue(f"{subject or 'the body'}: {problem[:1].lower()}{problem[1:]}", param=path or None)


def _fields_at(path: str, body_type: type[Any]) -> Iterator[str]:
    """Yield the names of the fields that the object at `path` may have, in a body of this type."""
    types = list(_alternatives(_type_info(body_type)))  # type: ignore[arg-type]  # classes are hashable
    for step in _STEP.findall(path):
        types = [inner for outer in types for inner in _types_inside(outer, step)]
    return (field.encode_name for found in types if isinstance(found, inspect.StructType) for field in found.fields)


_type_info = functools.cache(inspect.type_info)  # takes 18 ms for a chat completion, for which all other requests wait


def _types_inside(outer: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yield the types that a value of the type `outer` may have at one step of a path."""
    if isinstance(outer, inspect.StructType):
        for field in outer.fields:
            if field.encode_name == step:
                yield from _alternatives(field.type)
    elif isinstance(outer, inspect.ListType):
        yield from _alternatives(outer.item_type)
    elif isinstance(outer, inspect.DictType):
        yield from _alternatives(outer.value_type)


def _alternatives(found: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types that a type consists of, without annotations."""
    if isinstance(found, inspect.Metadata):
        yield from _alternatives(found.type)
    elif isinstance(found, inspect.UnionType):
        for alternative in found.types:
            yield from _alternatives(alternative)
    else:
        yield found


def _in_words(types: str) -> str:
    """Return the types in a decoder's message in words: `str | null` becomes `a string or null`."""
    *others, last = [word for name in types.split(" | ") for word in _WORDS.get(name, (name,))]
    return f"{', '.join(others)} or {last}" if others else last


def _join_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
