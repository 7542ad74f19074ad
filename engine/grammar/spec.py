"""A request's constraint on its text, as one hashable value, with quick checks only. Knows no grammar library.

`grammar_spec` is called by the thread that steps, so it does not parse schemas: the compiling process calls
`check_schema_text`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from engine.protocol import GUIDED_BYTES_MAX, InvalidOption, SamplingParams

Kind = Literal["json", "regex", "choice", "grammar"]

SCHEMA_DEPTH_MAX = 100
MESSAGE_CHARS_MAX = 1000

PARAMS: dict[Kind, str] = {
    "json": "guided_json",
    "regex": "guided_regex",
    "choice": "guided_choice",
    "grammar": "guided_grammar",
}


class GrammarError(InvalidOption):
    """The constraint cannot be enforced: malformed, not expressible, or beyond a limit. `param` names the field.

    A message may quote the request, and a frame carries one for each answer. So it is plain text, and cut when long.
    """

    def __init__(self, param: str, message: str) -> None:
        if len(message) > MESSAGE_CHARS_MAX:
            message = f"{message[:MESSAGE_CHARS_MAX]}…"
        super().__init__(param, message.encode(errors="backslashreplace").decode())


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """One constraint on the text of an answer. `text` is the schema as JSON, the regex, the grammar, or the choices as a JSON
    list. Equal specs share one compile."""

    kind: Kind
    text: str

    @property
    def param(self) -> str:
        """The field of the request that it came from."""
        return PARAMS[self.kind]


def grammar_spec(sampling: SamplingParams) -> GrammarSpec | None:
    """Return the constraint of a request, None when it has none. `SamplingParams` has checked that there is only
    one, and its type.

    Raises `GrammarError`, an `InvalidOption`, that names the field, for a text that is empty, too large or not UTF-8.
    """
    kind = next((kind for kind, param in PARAMS.items() if getattr(sampling, param) is not None), None)
    if kind is None:
        return None
    param = PARAMS[kind]
    value = getattr(sampling, param)
    text = json.dumps(value, ensure_ascii=False) if kind == "choice" else value
    _check_size(param, text, GUIDED_BYTES_MAX[param])
    if not text.strip():
        raise GrammarError(param, f"{param} is empty")
    return GrammarSpec(kind, text)


def check_schema_text(text: str) -> dict[str, object] | bool:
    """Return the schema that a JSON text holds. Raises `GrammarError` for a text that cannot be a JSON Schema."""
    param = PARAMS["json"]
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise GrammarError(param, f"the schema is nested more than {SCHEMA_DEPTH_MAX} levels deep") from None
    except ValueError as error:
        raise GrammarError(param, f"the schema is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(param, f"the schema must be a JSON object or boolean, not {type(schema).__name__}")
    if schema is False:
        raise GrammarError(param, "the schema is false, which no text satisfies")
    if _depth(schema) > SCHEMA_DEPTH_MAX:
        raise GrammarError(param, f"the schema is nested more than {SCHEMA_DEPTH_MAX} levels deep")
    if "\\u" in text:  # only an escape can hold half of a pair
        _encode(param, json.dumps(schema, ensure_ascii=False))
    return schema


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _depth(value: object) -> int:
    """Levels of nesting, counted without recursion: a hostile text may nest deeper than Python's stack."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = inner
    return depth


def _check_size(param: str, text: str, limit: int) -> None:
    size = len(_encode(param, text))
    if size > limit:
        raise GrammarError(param, f"{param} takes at most {limit} bytes, not {size}")


def _encode(param: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise GrammarError(param, f"{param} holds half of a surrogate pair, which is not text") from error
