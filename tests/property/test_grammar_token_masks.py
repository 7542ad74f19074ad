"""Masks over tokens of several bytes, compared byte by byte: the library's prefix tree and slices are the fast path."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.grammar.lark import to_lark
from engine.grammar.matcher import CompiledGrammar, answer_grammar, token_trie
from engine.grammar.spec import GrammarSpec, Kind
from engine.grammar.vocabulary import Vocabulary
from tests.support.grammars import BYTES, EOS, byte_trie, empty_mask

TOKENS = (
    *BYTES.tokens,
    *(b'{"', b'":', b'", "', b'"}', b']}', b"\\n", b"\\u00", b"12", b"3.5", b"true", b"null", b"\x00a"),
    *(b"abc", b"abc", b"ab", b"a", b"<|x|>", b"\n\n  ", b" " * 128, b"x" * 64, b"x" * 65, b'"' + b"x" * 300),
    *("é€😀".encode(), "é".encode(), b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"\xa9b", b"a\xc3", b"\x80\x80", b"\xff\xfe"),
)  # fmt: skip
GRAMMARS: list[tuple[Kind, str]] = [
    ("json", "{}"),
    ("json", '{"type": "object", "properties": {"abc": {"maxLength": 70, "type": "string"}, "é": {"type": "number"}}}'),
    ("regex", r"(abc|x{64,66}|é€|\S)*"),
    ("regex", r"[\s\S]*"),
    ("choice", '["abc", "ab", "é", "x"]'),
    ("grammar", 'root ::= "a" root "b" | [é€😀]*'),
    ("grammar", 'start: (/(?s:.)/ | "ab"i)*'),
]


def follow(matcher: Any, token: bytes) -> bool:
    """Advance a matcher over single bytes; whether it took all of the token."""
    return bool(matcher.try_consume_tokens([byte + 1 for byte in token]) == len(token))


@pytest.mark.parametrize(("kind", "text"), GRAMMARS)
@pytest.mark.parametrize("size", [288, 289, 319])
def test_a_mask_allows_exactly_the_tokens_whose_bytes_may_follow(kind: Kind, text: str, size: int) -> None:
    vocabulary, rng = Vocabulary(TOKENS + (b"",) * (size - len(TOKENS)), (EOS,)), random.Random(size)
    spec = GrammarSpec(kind, text)
    lark = answer_grammar(to_lark(spec), first_space=False)
    over_tokens, over_bytes = CompiledGrammar(token_trie(vocabulary), lark, spec), CompiledGrammar(byte_trie(), lark, spec)
    for _ in range(3):
        state, matcher = over_tokens.start(), over_bytes.matcher()
        for _ in range(8):
            row = empty_mask(vocabulary)
            state.fill_mask(row)
            allowed = {32 * index + bit for index, word in enumerate(row) for bit in range(32) if word >> bit & 1}
            plain = {index for index, token in enumerate(vocabulary.tokens) if token and follow(matcher.deep_copy(), token)}
            assert allowed == plain | ({EOS} if matcher.is_accepting() else set())
            if not plain:
                break
            token_id = rng.choice(sorted(plain))
            state.accept(token_id)
            follow(matcher, vocabulary.tokens[token_id])
