"""Grammars over one vocabulary, in the form used by the library that fills the masks. The only module that imports
llguidance."""

from __future__ import annotations

import ctypes
import functools
import json
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import llguidance

from engine.grammar.spec import GrammarError, GrammarSpec
from engine.grammar.vocabulary import NO_BYTES, Vocabulary

# Limits of one step. Lexer fuel and parser items are counted by the library (50,000 and 20,000 a millisecond, roughly), so the
# bound is the same on any machine. What a step has computed is cached for later steps of all requests, so only the first steps
# come near the limits; `ALLOWANCE_S` and `TOKEN_ALLOWANCE_S` bound the sum. A request that exceeds any of them fails alone.
STEP_LEXER_FUEL = 8_000_000
STEP_ITEMS_MAX = 60_000
LEXER_STATES_MAX = 30_000
SMALL_TABLE_STATES = 4_000
"""A grammar begins with a small table of lexer states, which its requests share; most never need the large one."""
REPLACEMENT_S_MAX = 0.05
"""The table of a grammar may be replaced in a step if that takes this much CPU time at most."""
LEXER_STATE_BYTES = 1024
"""An upper estimate: full tables of 30,000 states were measured to take 14 to 23 MB."""
ALLOWANCE_S = 1.0
TOKEN_ALLOWANCE_S = 0.004
TRIAL_RUNS = 3
TRIAL_TOKENS = 40
COMPILE_LEXER_FUEL = 2_000_000
GRAMMAR_SYMBOLS_MAX = 500_000
TOKEN_BYTES_MAX = 1024
"""The library panics on a vocabulary with a longer token, so such a token is not allowed in an answer with a grammar."""
NO_TEXT = "NoExtensionBias"  # the library's word for a state without a next byte
FORBIDDEN = "doesn't satisfy the grammar"  # and for a token that the mask forbids


class _TokenTable:
    """The vocabulary in the form that the library reads. The library tokenises text only to fast-forward, which we do not
    use."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens: Sequence[bytes] = [token if len(token) <= TOKEN_BYTES_MAX else NO_BYTES for token in vocabulary.tokens]
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.special_token_ids = list(vocabulary.eos_token_ids)

    def __call__(self, _text: bytes | str) -> list[int]:
        return []


def token_trie(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """The vocabulary, which has an end token, as the library's prefix tree, built once per model."""
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_TokenTable(vocabulary)),
        eos_token=list(vocabulary.eos_token_ids),
        slices=llguidance.LLTokenizer.json_slices(),
    )


@functools.cache
def _byte_trie() -> llguidance.LLTokenizer:
    """A vocabulary of single bytes, for tests of grammars."""
    vocabulary = Vocabulary((b"", *(bytes([byte]) for byte in range(256))), (0,))
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_TokenTable(vocabulary)), slices=[])


def has_no_text(lark: str) -> bool:
    """Whether a grammar of one terminal has no text: the library finds neither a first byte nor the end."""
    matcher = llguidance.LLMatcher(_byte_trie(), answer_grammar(lark, first_space=False), log_level=0)
    matcher.compute_bitmask()
    return bool(matcher.is_error() and matcher.get_error().startswith(NO_TEXT))


def limits(states_max: int) -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=COMPILE_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_ITEMS_MAX,
        max_lexer_states=states_max,
        max_grammar_size=GRAMMAR_SYMBOLS_MAX,
        verbose_errors=False,
    )


class TooManyStates(GrammarError):
    """The table of lexer states is too small for the grammar."""


class Built(NamedTuple):
    """What the worker measured of a grammar: its memory, the CPU time of its construction, and how many lexer states its table
    should have (LEXER_STATES_MAX if None)."""

    num_bytes: int = 0
    construction_s: float = 0.0
    states_max: int | None = None


def new_matcher(trie: llguidance.LLTokenizer, lark: str, spec: GrammarSpec, states_max: int) -> Any:
    """Construct a matcher with an empty table of at most `states_max` lexer states. Raises `GrammarError` naming the field of
    `spec`."""
    matcher = llguidance.LLMatcher(trie, lark, log_level=0, limits=limits(states_max))
    if matcher.is_error():
        reason = _first_line(matcher.get_error())
        if reason.startswith("panic") or "number of symbols" in reason:
            reason = "it is too large"  # the library counts symbols in 16 bits
        elif "fuel" in reason or "lexer configuration" in reason:
            reason = "its patterns together are too complex"
        raise GrammarError(spec.param, f"{spec.param} cannot be compiled: {reason}")
    return matcher


def try_out(matcher: Any, spec: GrammarSpec) -> None:
    """Generate random texts: this refuses a grammar that has no text or costs too much, before any request uses it, and fills
    the lexer's cache for the first steps of requests. Raises `GrammarError` naming the field of `spec`, `TooManyStates` if a
    larger table may help."""
    rng = random.Random(0)  # noqa: S311 - the same walks in the process that checks a grammar and in the one that uses it
    for _ in range(TRIAL_RUNS):
        _generate(matcher.deep_copy(), rng, spec)


def _generate(matcher: Any, rng: random.Random, spec: GrammarSpec) -> None:
    for _ in range(TRIAL_TOKENS):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            reason = _first_line(matcher.get_error())
            if reason == NO_TEXT:
                raise GrammarError(spec.param, f"{spec.param} cannot be satisfied by any text")
            error = TooManyStates if "too many states" in reason else GrammarError
            raise error(spec.param, f"{spec.param} cannot be enforced: a step would cost too much ({reason})")
        if matcher.is_stopped():
            return
        start = rng.randrange(len(mask))
        byte_index = next(i for i in (*range(start, len(mask)), *range(start)) if mask[i])  # an empty mask is an error above
        bit = rng.choice([bit for bit in range(8) if mask[byte_index] >> bit & 1])
        matcher.consume_token(8 * byte_index + bit)


def answer_grammar(lark: str, *, first_space: bool) -> str:
    """The grammar of an answer's bytes, from the grammar of its text: with `first_space` the decoder drops a leading space, so
    the bytes are a space, then the text. Without `no_forcing`, the mask would allow only the tokens into which `_TokenTable`
    divides forced text, which are none."""
    lark = '%llguidance {"no_forcing": true}\n' + lark
    if not first_space:
        return lark
    start = '%llguidance {"no_forcing": true}\nstart: " " @text'
    return json.dumps({"grammars": [{"lark_grammar": start}, {"name": "text", "lark_grammar": lark}]})


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0]


class CompiledGrammar:
    """A grammar ready for any number of requests.

    The library keeps the lexer's states in a table shared by all matchers that were copied from one. When the table is full, or
    a step has used up its fuel, all of them fail. The table is then replaced by a large one, and requests that did not cause
    the failure go on with that (`GrammarState`). As the step waits for this, a grammar that takes long to construct begins with
    a large table, and when that fails, so do all its requests: the grammar is then `is_used_up`.
    """

    __slots__ = ("_built", "_lark", "_matcher", "_states_max", "_trie", "is_used_up", "spec", "table_number")

    def __init__(self, trie: llguidance.LLTokenizer, lark: str, spec: GrammarSpec, built: Built | None = None) -> None:
        """Raises `GrammarError` naming the field of `spec`."""
        self.spec = spec
        self.table_number = 0
        self.is_used_up = False
        self._trie = trie
        self._lark = lark
        self._built = built or Built()
        self._states_max = self._built.states_max or LEXER_STATES_MAX
        self._matcher = new_matcher(trie, lark, spec, self._states_max)
        try_out(self._matcher, spec)

    @property
    def num_bytes(self) -> int:
        """Memory that the grammar takes once its table is full: an upper estimate."""
        return self._built.num_bytes + self._states_max * LEXER_STATE_BYTES

    def start(self) -> GrammarState:
        """The state before the first token of an answer; microseconds."""
        return GrammarState(self)

    def matcher(self) -> Any:
        """A matcher in the start state."""
        return self._matcher.deep_copy()

    def replace_table(self, failed_number: int) -> None:
        """Replace the table numbered `failed_number`, unless another request has done so already. A grammar whose replacement
        would take longer than REPLACEMENT_S_MAX becomes `is_used_up`."""
        if failed_number != self.table_number:
            return
        if self._built.construction_s > REPLACEMENT_S_MAX:
            self.is_used_up = True
            return
        self.table_number += 1
        self._states_max = LEXER_STATES_MAX
        self._matcher = new_matcher(self._trie, self._lark, self.spec, self._states_max)


class GrammarState:
    """The state of one request in its grammar. Not thread-safe: one caller at a time."""

    __slots__ = ("_grammar", "_matcher", "_spent_s", "_table_number", "_tokens")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher()
        self._table_number = grammar.table_number
        self._tokens: list[int] = []
        self._spent_s = 0.0

    def fill_mask(self, row: Any) -> None:
        """Write the packed mask of the next token. `row`: [ceil(V / 32)] int32, a writable buffer (a numpy row); bit i % 32 of
        word i // 32 is 1 when token i may follow. Releases the interpreter lock. End-of-sequence is allowed exactly while
        `is_complete`. Raises `GrammarError` when the mask costs more than a step may."""
        view = memoryview(row).cast("B")
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        start_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(address, view.nbytes)
        if self._matcher.is_error():
            self._replay_tokens()
            self._matcher.unsafe_compute_mask_ptr(address, view.nbytes)
            if self._matcher.is_error():
                raise self._failure("cannot be followed further")
        self._spent_s += time.thread_time() - start_s
        if self._spent_s > ALLOWANCE_S + TOKEN_ALLOWANCE_S * len(self._tokens):
            spent = f"{self._spent_s:.1f} s of mask time in {len(self._tokens)} tokens"
            raise self._error(f"has used {spent}, more than a request may use")

    def accept(self, token_id: int) -> None:
        """Advance by one sampled token. Raises `GrammarError` for a token that the mask forbids."""
        problem = f"does not allow token {token_id} here"
        if not self._matcher.consume_token(token_id):
            if FORBIDDEN in self._matcher.get_error():
                raise self._error(problem)
            self._replay_tokens()
            if not self._matcher.consume_token(token_id):
                raise self._failure(problem)
        self._tokens.append(token_id)

    @property
    def is_complete(self) -> bool:
        """The text so far satisfies the grammar: the request may end here."""
        return bool(self._matcher.is_accepting())

    def _replay_tokens(self) -> None:
        """Return to the same state with a fresh table: another request may have used up the shared one."""
        self._grammar.replace_table(self._table_number)
        if self._grammar.is_used_up:
            raise self._error("cannot be followed further")
        self._table_number = self._grammar.table_number
        self._matcher = self._grammar.matcher()
        if not all(self._matcher.consume_token(token_id) for token_id in self._tokens):  # each with the fuel of a step
            raise self._failure("cannot be followed further")

    def _failure(self, problem: str) -> GrammarError:
        """The error of a request that failed with its own table. Replaces the table for the other requests."""
        error = self._error(problem)
        self._grammar.replace_table(self._table_number)
        return error

    def _error(self, problem: str) -> GrammarError:
        param = self._grammar.spec.param
        return GrammarError(param, f"the grammar of {param} {problem}: {_first_line(self._matcher.get_error())}")
