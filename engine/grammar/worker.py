"""A process that checks grammars before the engine builds them: it can be killed, and a Rust call in a thread cannot.

Uses lines of JSON on its standard streams: first the vocabulary, then one constraint a line, each answered with its grammar
text or with an error. `python -m engine.grammar.worker`, started only by `grammar.compiler`.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
import threading
import time
from typing import IO, Any

from engine.grammar.lark import to_lark
from engine.grammar.matcher import (
    LEXER_STATES_MAX,
    REPLACEMENT_S_MAX,
    SMALL_TABLE_STATES,
    Built,
    TooManyStates,
    answer_grammar,
    new_matcher,
    token_trie,
    try_out,
)
from engine.grammar.spec import GrammarError, GrammarSpec
from engine.grammar.stacks import WORKER_STACK_BYTES, thread_stack_size
from engine.grammar.vocabulary import Vocabulary

GRAMMAR_CHARACTERS_MAX = 2_000_000
NICENESS = 10
"""A compile yields the CPU to the steps of running requests."""
HEAP_BYTES_MAX = 3 * 1024**3
ALARM_MARGIN_S = 2.0
"""The process ends itself this long after a deadline that its parent did not enforce, because the parent is dead."""


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo` of the C library (mallinfo(3)), whose fields are sizes modulo 2 ** 32."""

    _fields_ = [
        (name, ctypes.c_uint)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


_mallinfo = ctypes.CDLL(None).mallinfo
_mallinfo.restype = _HeapInfo


def _heap_bytes() -> int:
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def _build(trie: Any, lark: str, spec: GrammarSpec) -> Built:
    """Build a grammar, with a small table unless its trial needs a large one, and measure it. Raises `GrammarError`."""
    try:
        built = _build_with(SMALL_TABLE_STATES, trie, lark, spec)
    except TooManyStates:
        return _build_with(LEXER_STATES_MAX, trie, lark, spec)
    return built if built.construction_s <= REPLACEMENT_S_MAX else built._replace(states_max=LEXER_STATES_MAX)


def _build_with(states_max: int, trie: Any, lark: str, spec: GrammarSpec) -> Built:
    bytes_before, start_s = _heap_bytes(), time.thread_time()
    matcher = new_matcher(trie, lark, spec, states_max)
    construction_s = time.thread_time() - start_s
    try_out(matcher, spec)
    num_bytes = (_heap_bytes() - bytes_before) % 2**32
    return Built(num_bytes if num_bytes < HEAP_BYTES_MAX else 0, construction_s, states_max)


def vocabulary_line(vocabulary: Vocabulary) -> bytes:
    tokens = [token.hex() for token in vocabulary.tokens]
    return _line({"tokens": tokens, "eos": vocabulary.eos_token_ids, "strips": vocabulary.strips_first_space})


def job_line(spec: GrammarSpec, deadline_s: float) -> bytes:
    return _line({"kind": spec.kind, "text": spec.text, "deadline_s": deadline_s})


def _line(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _read_vocabulary(line: bytes) -> Vocabulary:
    value = json.loads(line)
    return Vocabulary(tuple(bytes.fromhex(token) for token in value["tokens"]), tuple(value["eos"]), value["strips"])


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer jobs until the other side closes. Each answer is {"lark": text, "built": list} or {"error": message}."""
    vocabulary = _read_vocabulary(requests.readline())
    trie = token_trie(vocabulary)
    for line in requests:
        job = json.loads(line)
        signal.alarm(math.ceil(job["deadline_s"] + ALARM_MARGIN_S))
        spec = GrammarSpec(job["kind"], job["text"])
        try:
            lark = answer_grammar(to_lark(spec), first_space=vocabulary.strips_first_space)
            if len(lark) > GRAMMAR_CHARACTERS_MAX:
                raise GrammarError(spec.param, f"{spec.param} makes a grammar of more than {GRAMMAR_CHARACTERS_MAX} characters")
            answer: dict[str, Any] = {"lark": lark, "built": _build(trie, lark, spec)}
        except GrammarError as error:
            answer = {"error": str(error)}
        except (RecursionError, MemoryError):
            answer = {"error": f"{spec.param} is too deeply nested or too large to compile"}
        signal.alarm(0)
        answers.write(_line(answer))
        answers.flush()


if __name__ == "__main__":
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (HEAP_BYTES_MAX, HEAP_BYTES_MAX))
    with thread_stack_size(WORKER_STACK_BYTES):
        thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer), name="proving")
        thread.start()
    thread.join()
