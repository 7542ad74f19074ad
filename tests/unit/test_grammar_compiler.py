"""The grammar compiler: its worker processes, deadlines, cache, tenants' queues, failures; masks of compiled grammars."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engine.errors import EngineOverloaded
from engine.grammar import compile_queue, matcher
from engine.grammar import compiler as compiler_module
from engine.grammar.compile_queue import CompileQueue
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.lark import to_lark
from engine.grammar.masks import GrammarMasks
from engine.grammar.matcher import GrammarState
from engine.grammar.spec import GrammarError, GrammarSpec
from engine.grammar.vocabulary import Vocabulary
from tests.support.grammars import BYTES, EOS, byte_trie, compiled, empty_mask
from tests.support.open_files import use_up_low_descriptors
from tests.support.sampling import sampling_request
from tests.support.thread_limit import forbid_new_threads

ALICE, BOB = "alice", "bob"
TWO_TOKENS = Vocabulary((b"", b"{", b"}", b" {", b'"a"', b"", b""), (0, 5), strips_first_space=True)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(BYTES, deadline_s=60.0, workers=1)
    yield made
    made.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(BYTES, deadline_s=1.0, workers=1)
    yield made
    made.close()


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Workers compile no regular expression until this is set."""
    compile_in_worker, released = compiler_module._WorkerProcess.compile, threading.Event()

    def blocking_compile(process: compiler_module._WorkerProcess, spec: GrammarSpec, deadline_s: float) -> dict[str, str]:
        if spec.kind == "regex":
            assert released.wait(60)
        return compile_in_worker(process, spec, deadline_s)

    monkeypatch.setattr(compiler_module._WorkerProcess, "compile", blocking_compile)
    return released


def allowed_tokens(state: GrammarState, vocabulary: Vocabulary = BYTES) -> set[int]:
    row = empty_mask(vocabulary)
    state.fill_mask(row)
    return {32 * word_index + bit for word_index, word in enumerate(row) for bit in range(32) if word >> bit & 1}


def accept_text(state: GrammarState, text: str) -> None:
    for byte in text.encode():
        assert byte + 1 in allowed_tokens(state)
        state.accept(byte + 1)


def test_masks_follow_a_text_to_its_end(compiler: GrammarCompiler) -> None:
    state = compiler.submit(GrammarSpec("json", '{"enum": [12, 1]}'), ALICE).result().start()
    assert allowed_tokens(state) == {ord("1") + 1}
    accept_text(state, "1")
    assert state.is_complete
    assert allowed_tokens(state) == {ord("2") + 1, EOS}
    accept_text(state, "2")
    assert state.is_complete
    assert allowed_tokens(state) == {EOS}
    state.accept(EOS)


def test_a_grammar_is_compiled_in_a_process_with_high_file_descriptors() -> None:
    with use_up_low_descriptors():
        compiler = GrammarCompiler(BYTES, deadline_s=60.0, workers=1)
        try:
            accept_text(compiler.submit(GrammarSpec("choice", '["a"]'), ALICE).result().start(), "a")
        finally:
            compiler.close()


def test_a_worker_imports_the_engine_from_where_this_process_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    compiler = GrammarCompiler(BYTES, workers=1)
    assert compiler.submit(GrammarSpec("choice", '["a"]'), ALICE).result(timeout=60).start().is_complete is False
    compiler.close()


def test_equal_constraints_share_a_compilation(compiler: GrammarCompiler) -> None:
    first = compiler.submit(GrammarSpec("regex", "a+b"), ALICE)
    assert compiler.submit(GrammarSpec("regex", "a+b"), ALICE) is first


def test_states_of_one_grammar_are_independent(compiler: GrammarCompiler) -> None:
    grammar = compiler.submit(GrammarSpec("choice", '["ab", "cd"]'), ALICE).result()
    one, other = grammar.start(), grammar.start()
    accept_text(one, "a")
    accept_text(other, "cd")
    assert allowed_tokens(other) == {EOS}
    assert allowed_tokens(one) == {ord("b") + 1}


def test_accepting_a_forbidden_token_raises_an_error_that_names_the_field(compiler: GrammarCompiler) -> None:
    state = compiler.submit(GrammarSpec("regex", "[0-9]+"), ALICE).result().start()
    with pytest.raises(GrammarError, match="does not allow token") as caught:
        state.accept(ord("x") + 1)
    assert caught.value.param == "guided_regex"


def test_a_forbidden_token_costs_its_grammar_no_table(compiler: GrammarCompiler) -> None:
    grammar = compiler.submit(GrammarSpec("regex", "[0-9]+"), ALICE).result()
    with pytest.raises(GrammarError):
        grammar.start().accept(ord("x") + 1)
    assert grammar.table_number == 0


def doubling_references(depth: int) -> dict[str, object]:
    """Definitions that each refer to two others: 2 ** `depth` paths through them."""
    steps = [[{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}] for i in range(depth)]
    sides = [[{"allOf": [step, {"pattern": f"{side}{i}"}]} for side, step in enumerate(both)] for i, both in enumerate(steps)]
    return {f"a{i}": {"anyOf": side} for i, side in enumerate(sides)} | {f"a{depth}": {"minLength": 1}}


def nested_one_of(depth: int) -> dict[str, object]:
    if depth == 0:
        return {"pattern": "x"}
    return {"oneOf": [{"properties": {f"p{i}{depth}": nested_one_of(depth - 1)}} for i in range(8)]}


EXPLODING = {
    "counted": GrammarSpec("regex", "(a{100000}b){100001}"),
    "products": GrammarSpec("json", json.dumps({"allOf": [{"anyOf": [{"pattern": i + j} for j in "abcd"]} for i in "pqrst"]})),
    "nested oneOf": GrammarSpec("json", json.dumps(nested_one_of(3))),
    "doubling references": GrammarSpec("json", json.dumps({"$ref": "#/$defs/a0", "$defs": doubling_references(40)})),
    "residues": GrammarSpec("json", json.dumps({"not": {"anyOf": [{"multipleOf": p} for p in (4993, 4999, 5003)]}})),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPLODING)
def test_a_grammar_that_explodes_is_refused_without_blocking_this_process(impatient: GrammarCompiler, name: str) -> None:
    """This thread runs again before its process has used a second of processor time, whatever the load of the machine."""
    deadline_s, longest_s, last_s = time.monotonic() + 60.0, 0.0, time.process_time()
    future = impatient.submit(EXPLODING[name], ALICE)
    while not future.done():
        threading.Event().wait(0.001)
        longest_s, last_s = max(longest_s, time.process_time() - last_s), time.process_time()
        assert time.monotonic() < deadline_s
    assert longest_s < 1.0
    with pytest.raises(GrammarError) as caught:
        future.result()
    assert caught.value.param == EXPLODING[name].param


def test_slow_grammars_of_one_tenant_do_not_delay_those_of_another(released: threading.Event) -> None:
    compiler = GrammarCompiler(BYTES, workers=2)
    flood = [compiler.submit(GrammarSpec("regex", "a" * (1 + count)), ALICE) for count in range(20)]
    for text in ("b", "c"):
        assert compiler.submit(GrammarSpec("choice", f'["{text}"]'), BOB).result(timeout=60).start().is_complete is False
    assert not any(grammar.done() for grammar in flood)
    assert len(compiler._threads) == 2
    released.set()
    assert all(grammar.result(timeout=60) for grammar in flood)
    compiler.close()


@pytest.mark.parametrize(("has_one_caller", "other"), [(False, BOB), (True, ALICE)], ids=["two tenants", "one caller"])
def test_two_grammars_at_once_use_two_workers_although_only_one_was_idle(
    monkeypatch: pytest.MonkeyPatch, released: threading.Event, has_one_caller: bool, other: str
) -> None:
    compiler = GrammarCompiler(BYTES, workers=2, has_one_caller=has_one_caller)
    changed, is_idle = compiler._changed, threading.Event()
    wait = changed.wait

    def recording_wait(timeout: float | None = None) -> bool:
        is_idle.set()
        return wait(timeout)

    monkeypatch.setattr(changed, "wait", recording_wait)
    compiler.submit(GrammarSpec("choice", '["a"]'), ALICE).result(timeout=60)
    assert is_idle.wait(60)
    with changed:  # the idle worker does not wake before both are submitted
        slow = compiler.submit(GrammarSpec("regex", "a+"), ALICE)
        assert len(compiler._threads) == 1
        quick = compiler.submit(GrammarSpec("choice", '["b"]'), other)
    assert quick.result(timeout=60).start().is_complete is False
    assert not slow.done()
    released.set()
    assert slow.result(timeout=60)
    compiler.close()


def test_a_worker_that_misses_its_deadline_is_replaced() -> None:
    slow = GrammarSpec("json", json.dumps({"items": {"not": {"anyOf": [{"multipleOf": p} for p in (4993,)]}}}))
    compiler = GrammarCompiler(BYTES, deadline_s=0.05, workers=1)
    with pytest.raises(GrammarError, match=r"takes longer than 0\.05 s to compile"):
        compiler.submit(slow, ALICE).result()
    assert compiler.submit(GrammarSpec("choice", '["a"]'), ALICE).result().start().is_complete is False
    compiler.close()


@pytest.mark.parametrize(
    ("module", "name", "replacement"),
    [
        (subprocess, "Popen", mock.Mock(side_effect=BlockingIOError(errno.EAGAIN, "try again"))),
        (sys, "executable", "/bin/false"),
    ],
    ids=["no process", "ends at once"],
)
def test_if_no_process_can_start_the_grammar_is_refused_as_overloaded_and_the_next_one_compiles(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, replacement: Any
) -> None:
    compiler, spec = GrammarCompiler(BYTES, workers=1), GrammarSpec("choice", '["a"]')
    with monkeypatch.context() as patched:
        patched.setattr(module, name, replacement)
        with pytest.raises(EngineOverloaded, match="the system starts no more processes"):
            compiler.submit(spec, ALICE).result(timeout=60)
    assert compiler.submit(spec, ALICE).result(timeout=60).start().is_complete is False
    compiler.close()


def test_an_internal_error_at_the_start_of_a_worker_is_raised_and_the_next_compilation_gets_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker_process, spec = compiler_module._WorkerProcess, GrammarSpec("choice", '["a"]')

    def failing_start(vocabulary: Vocabulary) -> None:
        monkeypatch.setattr(compiler_module, "_WorkerProcess", worker_process)
        raise ValueError("a bug")

    monkeypatch.setattr(compiler_module, "_WorkerProcess", failing_start)
    compiler = GrammarCompiler(BYTES, workers=1)
    with pytest.raises(ValueError, match="a bug"):
        compiler.submit(spec, ALICE).result(timeout=60)
    assert compiler.submit(spec, ALICE).result(timeout=60).start().is_complete is False
    compiler.close()


def test_if_no_thread_can_start_the_grammar_is_refused_as_overloaded_and_the_next_one_compiles() -> None:
    compiler, spec = GrammarCompiler(BYTES, workers=1), GrammarSpec("choice", '["a"]')
    with forbid_new_threads(), pytest.raises(EngineOverloaded, match="the system starts no more threads"):
        compiler.submit(spec, ALICE).result(timeout=60)
    assert compiler.submit(spec, ALICE).result(timeout=60).start().is_complete is False
    compiler.close()


def test_if_no_thread_can_start_masks_are_refused_as_overloaded_and_work_later() -> None:
    masks, request = GrammarMasks(BYTES.size), sampling_request()
    grammar = compiled("choice", '["a"]')
    with forbid_new_threads():
        with pytest.raises(EngineOverloaded, match="the system starts no more threads"):
            masks.start(request, grammar)
        assert masks.are_empty
    masks.start(request, grammar)
    with forbid_new_threads():
        filled = masks.fill([request])
    assert filled is not None
    assert filled.result(timeout=60).rows.ne(0).sum() == 1
    masks.close()


def test_a_compiler_without_threads_can_be_closed() -> None:
    compiler = GrammarCompiler(BYTES)
    with forbid_new_threads():
        compiler.submit(GrammarSpec("choice", '["a"]'), ALICE)
    compiler.close()


def test_if_no_further_thread_can_start_a_grammar_waits_for_the_existing_one() -> None:
    compiler = GrammarCompiler(BYTES, workers=2)
    first = compiler.submit(GrammarSpec("choice", '["a"]'), ALICE)
    with forbid_new_threads():
        second = compiler.submit(GrammarSpec("choice", '["b"]'), BOB)
    assert first.result(timeout=60).start().is_complete is False
    assert second.result(timeout=60).start().is_complete is False
    compiler.close()


def test_a_worker_that_died_between_two_grammars_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    workers: list[compiler_module._WorkerProcess] = []

    class RecordedWorker(compiler_module._WorkerProcess):
        def __init__(self, vocabulary: Vocabulary) -> None:
            super().__init__(vocabulary)
            workers.append(self)

    monkeypatch.setattr(compiler_module, "_WorkerProcess", RecordedWorker)
    compiler = GrammarCompiler(BYTES, workers=1)
    for text in ("a", "c"):
        compiler.submit(GrammarSpec("choice", f'["{text}"]'), ALICE).result(timeout=60)
    assert len(workers) == 1
    workers[0]._process.kill()
    workers[0]._process.wait()
    assert compiler.submit(GrammarSpec("choice", '["b"]'), ALICE).result(timeout=60).start().is_complete is False
    assert [worker.is_alive for worker in workers] == [False, True]
    compiler.close()
    assert [worker.is_alive for worker in workers] == [False, False]


@pytest.fixture
def idle_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GrammarCompiler, subprocess.Popen[bytes]]]:
    """A compiler with one worker, which has compiled a grammar and waits for the next, and the process of this worker."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def recording_popen(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", recording_popen)
    compiler = GrammarCompiler(BYTES, workers=1)
    compiler.submit(GrammarSpec("choice", '["a"]'), ALICE).result(timeout=60)
    yield compiler, started[0]
    compiler.close()


def test_a_worker_that_stops_reading_misses_its_deadline_and_is_replaced(
    idle_worker: tuple[GrammarCompiler, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, process = idle_worker
    process.send_signal(signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "_deadline_s", 0.05)
        with pytest.raises(GrammarError, match=r"takes longer than 0\.05 s to compile"):
            compiler.submit(GrammarSpec("choice", json.dumps(["b" * 100_000])), ALICE).result(timeout=60)
    assert process.poll() is not None
    assert compiler.submit(GrammarSpec("choice", '["b"]'), ALICE).result(timeout=60).start().is_complete is False


def test_a_worker_that_dies_before_it_reads_a_grammar_is_not_the_fault_of_this_grammar(
    idle_worker: tuple[GrammarCompiler, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (compiler, process), spec = idle_worker, GrammarSpec("choice", '["b"]')
    process.kill()
    process.wait()
    with monkeypatch.context() as patched:
        patched.setattr(compiler_module._WorkerProcess, "is_alive", True)  # it dies just after the check
        with pytest.raises(BrokenPipeError):
            compiler.submit(spec, ALICE).result(timeout=60)
    assert compiler.submit(spec, ALICE).result(timeout=60).start().is_complete is False


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|aa)+c", "(.*)*x(.*)*"])
def test_a_pattern_with_catastrophic_backtracking_is_matched_in_linear_time(compiler: GrammarCompiler, pattern: str) -> None:
    state = compiler.submit(GrammarSpec("regex", pattern), ALICE).result().start()
    accept_text(state, "a" * 2000)
    assert not state.is_complete


@pytest.mark.parametrize("count", [1000, 1400])
def test_a_deeply_recursive_grammar_ends_at_most_the_worker(count: int) -> None:
    names = [f"p{index}" for index in range(count)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    program = (
        "import sys\n"
        "from engine.grammar.compiler import GrammarCompiler\n"
        "from engine.grammar.spec import GrammarError, GrammarSpec\n"
        "from tests.support.grammars import BYTES\n"
        "compiler = GrammarCompiler(BYTES, deadline_s=30.0, workers=1)\n"
        "future = compiler.submit(GrammarSpec('json', sys.stdin.read()), 'alice')\n"
        "assert isinstance(future.exception(), GrammarError | None)\n"
        "compiler.close()\n"
    )
    command = ["/bin/sh", "-c", 'ulimit -s unlimited 2>/dev/null; exec "$0" -c "$1"', sys.executable, program]
    completed = subprocess.run(command, input=json.dumps(schema), text=True, capture_output=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_closing_a_compiler_cancels_the_grammars_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()

    def blocking_compile(*_arguments: object) -> dict[str, str]:
        begun.set()
        assert released.wait(60)
        return {"error": "too late"}

    monkeypatch.setattr(compiler_module, "_WorkerProcess", mock.Mock(return_value=mock.Mock(compile=blocking_compile)))
    compiler = GrammarCompiler(BYTES, workers=1)
    running, waiting = [compiler.submit(GrammarSpec("regex", text), ALICE) for text in ("a", "b")]
    assert begun.wait(60)
    waiting.add_done_callback(lambda _: released.set())
    compiler.close()
    assert waiting.cancelled()
    assert isinstance(running.exception(timeout=60), GrammarError)


def test_a_closed_compiler_refuses_grammars() -> None:
    compiler = GrammarCompiler(BYTES)
    compiler.close()
    with pytest.raises(GrammarError, match="the engine is stopping"):
        compiler.submit(GrammarSpec("regex", "a"), ALICE).result()


def test_a_grammar_beyond_the_queue_limit_is_refused_as_overloaded() -> None:
    compiler = GrammarCompiler(BYTES)
    compiler._queue = CompileQueue(waiting_max=0)
    with pytest.raises(EngineOverloaded, match="0 grammars are already waiting"):
        compiler.submit(GrammarSpec("regex", "a"), ALICE).result()
    compiler.close()


def test_a_vocabulary_without_end_token_is_refused() -> None:
    compiler = GrammarCompiler(Vocabulary((b"a", b"b"), ()))
    with pytest.raises(GrammarError, match="end-of-sequence"):
        compiler.submit(GrammarSpec("regex", "a"), ALICE).result()
    compiler.close()


def test_the_first_token_has_the_space_that_the_decoder_strips() -> None:
    compiler = GrammarCompiler(TWO_TOKENS, workers=1)
    state = compiler.submit(GrammarSpec("regex", r"\{\}"), ALICE).result().start()
    assert allowed_tokens(state, TWO_TOKENS) == {3}
    state.accept(3)
    state.accept(2)
    assert allowed_tokens(state, TWO_TOKENS) == {0, 5}
    compiler.close()


@pytest.mark.parametrize(("num_bytes", "is_allowed"), [(matcher.TOKEN_BYTES_MAX, True), (matcher.TOKEN_BYTES_MAX + 1, False)])
def test_a_token_too_long_for_the_library_is_not_allowed_in_an_answer_with_a_grammar(num_bytes: int, is_allowed: bool) -> None:
    vocabulary = Vocabulary((b"", b"a", b"a" * num_bytes), (EOS,))
    grammar = matcher.CompiledGrammar(matcher.token_trie(vocabulary), "start: /a+/", GrammarSpec("regex", "a+"))
    assert allowed_tokens(grammar.start(), vocabulary) == ({1, 2} if is_allowed else {1})


def test_a_lexer_table_exhausted_by_one_request_is_replaced_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "LEXER_STATES_MAX", 40)
    monkeypatch.setattr(matcher, "TRIAL_RUNS", 0)
    grammar = compiled("regex", "(a|b){9}-[a-z]{9}-[A-Z]{9}")
    first, second = grammar.start(), grammar.start()
    accept_text(second, "ab")
    with pytest.raises(GrammarError, match=r"cannot be followed further|a step would cost too much"):
        accept_text(first, "aaaabbbbb-abcdefghi-ABCDEFGHI")
    monkeypatch.setattr(matcher, "LEXER_STATES_MAX", 30_000)
    accept_text(second, "aaaabbb-abcdefghi-ABCDEFGHI")  # further than the first came
    assert allowed_tokens(second) == {EOS}


def test_a_token_is_accepted_although_another_request_has_exhausted_the_lexer_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "LEXER_STATES_MAX", 40)
    monkeypatch.setattr(matcher, "TRIAL_RUNS", 0)
    grammar = compiled.__wrapped__("regex", "(a|b){9}-[a-z]{9}-[A-Z]{9}")
    first, second = grammar.start(), grammar.start()
    with pytest.raises(GrammarError):
        accept_text(first, "aaaabbbbb-abcdefghi-ABCDEFGHI")
    monkeypatch.setattr(matcher, "LEXER_STATES_MAX", 30_000)
    for byte in b"aaaabbbbb-abcdefghi-ABCDEFGHI":
        second.accept(byte + 1)
    assert second.is_complete


@pytest.mark.parametrize(
    ("kind", "text", "limit", "message"),
    [
        ("regex", "[a-z]{30}", "LEXER_STATES_MAX", "cannot be enforced: a step would cost too much"),
        ("regex", "([ab]|a[^b]){9}", "STEP_LEXER_FUEL", "cannot be enforced: a step would cost too much"),
        ("json", '{"type": "object"}', "STEP_ITEMS_MAX", "cannot be enforced: a step would cost too much"),
        ("json", '{"type": "object"}', "GRAMMAR_SYMBOLS_MAX", "cannot be compiled: it is too large"),
        ("regex", "([ab]|a[^b]){9}", "COMPILE_LEXER_FUEL", "cannot be compiled: its patterns together are too complex"),
        ("choice", '["z"]', None, "cannot be satisfied by any text"),
    ],
)
def test_a_grammar_that_no_request_could_follow_is_refused_when_it_is_built(
    monkeypatch: pytest.MonkeyPatch, kind: Any, text: str, limit: str | None, message: str
) -> None:
    vocabulary = BYTES
    if limit is None:
        vocabulary = TWO_TOKENS
    else:
        monkeypatch.setattr(matcher, limit, 10)
    spec = GrammarSpec(kind, text)
    lark = matcher.answer_grammar(to_lark(spec), first_space=vocabulary.strips_first_space)
    with pytest.raises(GrammarError, match=message) as caught:
        matcher.CompiledGrammar(matcher.token_trie(vocabulary), lark, spec)
    assert caught.value.param == spec.param


def test_masks_that_cost_too_much_time_end_only_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiled("regex", "[a-z]+")
    expensive, other = grammar.start(), grammar.start()
    monkeypatch.setattr(matcher, "ALLOWANCE_S", -1.0)
    with pytest.raises(GrammarError, match="more than a request may use"):
        allowed_tokens(expensive)
    monkeypatch.undo()
    accept_text(other, "abc")


def test_each_token_adds_to_the_mask_time_that_a_request_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "ALLOWANCE_S", 0.0)
    monkeypatch.setattr(matcher, "TOKEN_ALLOWANCE_S", 60.0)
    grammar = compiled("regex", "[a-z]+")
    first, second = grammar.start(), grammar.start()
    second.accept(ord("a") + 1)
    assert EOS in allowed_tokens(second)
    with pytest.raises(GrammarError, match=r"of mask time in 0 tokens, more than a request may use"):
        allowed_tokens(first)


def built_grammar(built: matcher.Built) -> matcher.CompiledGrammar:
    spec = GrammarSpec("regex", "(a|b){9}-[a-z]{9}-[A-Z]{9}")
    return matcher.CompiledGrammar(byte_trie(), matcher.answer_grammar(to_lark(spec), first_space=False), spec, built)


def test_a_grammar_that_needs_more_lexer_states_gets_a_larger_table_and_takes_more_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matcher, "TRIAL_RUNS", 0)
    grammar = built_grammar(matcher.Built(num_bytes=5, states_max=40))
    assert grammar.num_bytes == 5 + 40 * matcher.LEXER_STATE_BYTES
    accept_text(grammar.start(), "aaaabbbbb-abcdefghi-ABCDEFGHI")
    assert grammar.num_bytes == 5 + matcher.LEXER_STATES_MAX * matcher.LEXER_STATE_BYTES


def test_no_step_waits_for_the_table_of_a_grammar_that_takes_long_to_construct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "TRIAL_RUNS", 0)
    grammar = built_grammar(matcher.Built(construction_s=matcher.REPLACEMENT_S_MAX + 0.001, states_max=40))
    first, second = grammar.start(), grammar.start()
    accept_text(second, "a")
    monkeypatch.setattr(matcher, "new_matcher", mock.Mock(side_effect=AssertionError))
    for state, text in ((first, "aaaabbbbb-abcdefghi-ABCDEFGHI"), (second, "aaabbbbb-abcdefghi-ABCDEFGHI")):
        with pytest.raises(GrammarError, match=r"cannot be followed further: .*too many states"):
            accept_text(state, text)


def test_a_grammar_whose_requests_have_failed_together_is_compiled_again_for_the_next(compiler: GrammarCompiler) -> None:
    spec = GrammarSpec("choice", '["failed"]')
    first = compiler.submit(spec, ALICE).result(timeout=60)
    first.is_used_up = True
    second = compiler.submit(spec, ALICE).result(timeout=60)
    assert second is not first
    accept_text(second.start(), "failed")


def test_the_memory_of_a_grammar_includes_what_the_worker_measured(compiler: GrammarCompiler) -> None:
    table_bytes = matcher.SMALL_TABLE_STATES * matcher.LEXER_STATE_BYTES
    assert compiler.submit(GrammarSpec("choice", '["abc"]'), ALICE).result(timeout=60).num_bytes > table_bytes


def test_a_request_keeps_a_grammar_that_the_cache_drops(monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler) -> None:
    monkeypatch.setattr(compile_queue, "CACHED_BYTES_MAX", 0)
    spec = GrammarSpec("choice", '["abcd"]')
    first = compiler.submit(spec, ALICE)
    accept_text(first.result(timeout=60).start(), "abcd")
    compiler.submit(GrammarSpec("choice", '["e"]'), ALICE).result(timeout=60)
    assert compiler.submit(spec, ALICE) is not first


def test_a_table_is_replaced_once_however_many_requests_failed_with_it() -> None:
    grammar = compiled.__wrapped__("regex", "ab")
    failed_number = grammar.table_number
    grammar.replace_table(failed_number)
    replacement = grammar.table_number, grammar._matcher
    grammar.replace_table(failed_number)
    assert replacement == (grammar.table_number, grammar._matcher)
    assert replacement[0] != failed_number
