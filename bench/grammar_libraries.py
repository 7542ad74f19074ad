"""Grammar libraries behind one interface, for `bench.structured_output`: ours, llguidance's own JSON schemas, and xgrammar."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

from engine.grammar.lark import to_lark
from engine.grammar.matcher import CompiledGrammar, answer_grammar, limits, token_trie
from engine.grammar.spec import GrammarError, GrammarSpec
from engine.grammar.vocabulary import Vocabulary


class Refused(Exception):
    """The library explicitly refuses the schema."""


class Stopped(Exception):
    """The library gave up in the middle of a text."""


class Follower(Protocol):
    """Follows one text under a grammar."""

    def mask(self) -> Sequence[int]: ...

    def accept(self, token_id: int) -> bool: ...


class Library(Protocol):
    """A grammar library set up for one vocabulary."""

    def compile(self, schema: str) -> Any: ...

    def follow(self, compiled: Any) -> Follower: ...


class Ours:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._trie = token_trie(vocabulary)
        self._words = -(-vocabulary.size // 32)

    def compile(self, schema: str) -> CompiledGrammar:
        spec = GrammarSpec("json", schema)
        try:
            return CompiledGrammar(self._trie, answer_grammar(to_lark(spec), first_space=False), spec)
        except GrammarError as error:
            raise Refused(str(error)) from error

    def follow(self, compiled: CompiledGrammar) -> Follower:
        return _OursFollower(compiled, self._words)


class _OursFollower:
    def __init__(self, compiled: CompiledGrammar, words: int) -> None:
        self._state = compiled.start()
        self._row = (ctypes.c_uint32 * words)()

    def mask(self) -> Sequence[int]:
        try:
            self._state.fill_mask(self._row)
        except GrammarError as error:
            raise Stopped(str(error)) from error
        return self._row

    def accept(self, token_id: int) -> bool:
        try:
            self._state.accept(token_id)
        except GrammarError:
            return False
        return True


class Llguidance:
    """llguidance with its own translation of JSON schemas into grammars."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._trie = token_trie(vocabulary)
        self._words = -(-vocabulary.size // 32)

    def compile(self, schema: str) -> Any:
        from llguidance import LLMatcher

        grammar = '%llguidance {"no_forcing": true}\nstart: %json ' + schema
        matcher = LLMatcher(self._trie, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise Refused(matcher.get_error().partition("\n")[0])
        return matcher

    def follow(self, compiled: Any) -> Follower:
        return _LlguidanceFollower(compiled.deep_copy(), self._words)


class _LlguidanceFollower:
    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._row = (ctypes.c_uint32 * words)()

    def mask(self) -> Sequence[int]:
        self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(self._row), ctypes.sizeof(self._row))
        if self._matcher.is_error():
            raise Stopped(self._matcher.get_error())
        return self._row

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))


class Xgrammar:
    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._size = vocabulary.size
        tokens = list(vocabulary.tokens)
        info = xgrammar.TokenizerInfo(tokens, vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.eos_token_ids))
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Any:
        try:
            return self._compiler.compile_json_schema(schema, any_whitespace=True, strict_mode=False)
        except Exception as error:
            raise Refused(str(error).partition("\n")[0]) from error

    def follow(self, compiled: Any) -> Follower:
        return _XgrammarFollower(compiled, self._size)


class _XgrammarFollower:
    def __init__(self, compiled: Any, size: int) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._bits = xgrammar.allocate_token_bitmask(1, size)
        words = self._bits.numel()
        self._row = (ctypes.c_uint32 * words).from_address(self._bits.data_ptr())

    def mask(self) -> Sequence[int]:
        if self._matcher.is_terminated():
            return (ctypes.c_uint32 * len(self._row))()
        self._matcher.fill_next_token_bitmask(self._bits)
        return self._row

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


LIBRARIES: dict[str, Any] = {"ours": Ours, "llguidance": Llguidance, "xgrammar": Xgrammar}
