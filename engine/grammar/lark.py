"""A constraint as grammar text for the library: JSON schemas, regular expressions, choices, and grammars of the client."""

from __future__ import annotations

import json
import re

from engine.grammar.gbnf import GbnfError, gbnf_to_lark
from engine.grammar.json_grammar import JsonGrammar
from engine.grammar.matcher import has_no_text
from engine.grammar.patterns import PatternError, full_language
from engine.grammar.regex import Regex, alt, literal
from engine.grammar.schema_cases import conjunction
from engine.grammar.schema_document import Document
from engine.grammar.schema_keywords import Keywords
from engine.grammar.schema_nodes import parse
from engine.grammar.spec import GrammarError, GrammarSpec, check_schema_text
from engine.grammar.term_shapes import Shapes
from engine.grammar.terminals import Terminals


def to_lark(spec: GrammarSpec) -> str:
    """Raises `GrammarError` for what cannot be expressed, naming it."""
    if spec.kind == "json":
        return schema_to_lark(spec.text)
    if spec.kind == "choice":
        return language_to_lark(alt(*(literal(choice) for choice in json.loads(spec.text))))
    if spec.kind == "regex":
        try:
            language = full_language(spec.text)
        except PatternError as error:
            raise GrammarError(spec.param, f"guided_regex cannot be enforced: {error}") from error
        return language_to_lark(language)
    if "::=" in spec.text:
        try:
            return gbnf_to_lark(spec.text)
        except GbnfError as error:
            raise GrammarError(spec.param, f"guided_grammar cannot be read: {error}") from error
    return checked_lark(spec.text)


def schema_to_lark(text: str) -> str:
    """A JSON schema as a grammar of exactly the JSON texts that satisfy it. What cannot be expressed exactly is refused by
    name."""
    check_schema_text(text)
    document = Document(parse(text))
    return JsonGrammar(Shapes(Keywords(document), matches_nothing)).write(conjunction([document.root]))


def checked_lark(text: str) -> str:
    """A client's grammar in the library's own notation. Directives that are not about the text, or not exact, are refused."""
    unquoted = _QUOTED.sub(" ", text)
    for construct, reason in _REFUSED.items():
        if re.search(construct, unquoted):
            raise GrammarError("guided_grammar", f"guided_grammar cannot be enforced: {reason}")
    return text


# Strings, comments and regular expressions, of which only the last may span lines: their contents are not syntax.
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"i?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/[imslux]*')
_REFUSED = {
    "<": "special tokens (<…>) are not text",
    "@": "grammars of other names (@…)",
    r"%json\b": "%json, which approximates some schemas; use guided_json",
    r"%(?:llguidance|import|declare|override|extend)\b": "%llguidance, %import, %declare, %override and %extend",
    r"\[[^\]]*\b(?:stop|suffix|lazy|max_tokens|temperature|capture|stop_capture)\b": "options of a rule ([stop=…], [lazy] …)",
}


def language_to_lark(language: Regex) -> str:
    """A grammar of the texts of a regular language."""
    terminals = Terminals()
    name = terminals.name(terminals.text(language))
    return "\n".join([f"start: {name}", *terminals.lines()]) + "\n"


def matches_nothing(language: Regex) -> bool:
    """Whether a language contains no text."""
    return has_no_text(language_to_lark(language))
