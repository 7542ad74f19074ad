"""A JSON schema as a grammar of exactly the JSON texts that satisfy it. What cannot be expressed exactly is refused by name."""

from __future__ import annotations

from collections.abc import Callable

from engine.grammar.json_grammar import JsonGrammar
from engine.grammar.regex import Regex
from engine.grammar.schema_cases import conjunction
from engine.grammar.schema_document import Document
from engine.grammar.schema_nodes import parse
from engine.grammar.shapes import Shapes
from engine.grammar.spec import check_schema_text


def schema_to_lark(text: str, matches_nothing: Callable[[Regex], bool]) -> str:
    """The grammar of a schema's text. `matches_nothing` decides whether a regular language is empty. Raises `GrammarError`."""
    check_schema_text(text)
    document = Document(parse(text))
    return JsonGrammar(Shapes(document, matches_nothing)).write(conjunction([document.root]))
