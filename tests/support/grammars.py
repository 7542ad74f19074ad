"""Grammars over a vocabulary of single bytes, to test whether a text satisfies one, and a synchronous compiler."""

from __future__ import annotations

import ctypes
import functools
import json
from concurrent.futures import Future
from typing import Any

from engine.grammar.lark import to_lark
from engine.grammar.matcher import CompiledGrammar, answer_grammar, token_trie
from engine.grammar.spec import GrammarSpec, Kind
from engine.grammar.vocabulary import Vocabulary

EOS = 0
BYTES = Vocabulary((b"", *(bytes([byte]) for byte in range(256))), (EOS,))


def empty_mask(vocabulary: Vocabulary = BYTES) -> ctypes.Array[ctypes.c_int32]:
    """A mask buffer to fill: one bit per token, in 32-bit words."""
    return (ctypes.c_int32 * -(-vocabulary.size // 32))()


@functools.cache
def byte_trie() -> Any:
    return token_trie(BYTES)


class ImmediateCompiler:
    """Compiles grammars over the vocabulary of `trie` as soon as they are submitted, in place of the engine's compiler."""

    def __init__(self, trie: Any) -> None:
        self._trie = trie

    def submit(self, spec: GrammarSpec, tenant_id: str) -> Future[CompiledGrammar]:
        done: Future[CompiledGrammar] = Future()
        done.set_result(CompiledGrammar(self._trie, answer_grammar(to_lark(spec), first_space=False), spec))
        return done

    def close(self) -> None:
        """There is nothing to close."""


@functools.lru_cache(maxsize=256)
def compiled(kind: Kind, text: str) -> CompiledGrammar:
    """Raises `GrammarError`, as the engine's compiler does."""
    spec = GrammarSpec(kind, text)
    return CompiledGrammar(byte_trie(), answer_grammar(to_lark(spec), first_space=False), spec)


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether the whole text satisfies the grammar."""
    matcher = grammar.matcher()
    tokens = [byte + 1 for byte in text.encode()]
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def schema_accepts(schema: Any, value: Any, *, ensure_ascii: bool = True) -> bool:
    """Whether the value is accepted in compact and in ordinary spacing; both must agree."""
    grammar = compiled("json", json.dumps(schema))
    compact = accepts(grammar, json.dumps(value, separators=(",", ":"), ensure_ascii=ensure_ascii))
    for spacing in ({}, {"indent": 4}):
        assert accepts(grammar, json.dumps(value, ensure_ascii=ensure_ascii, **spacing)) == compact  # type: ignore[arg-type]
    return compact
