"""Threads with a stack of a known size."""

from __future__ import annotations

import threading

from engine.grammar.stacks import STACK_BYTES, WORKER_STACK_BYTES, thread_stack_size


def test_only_threads_started_in_the_block_have_the_size() -> None:
    before = threading.stack_size()
    with thread_stack_size(WORKER_STACK_BYTES):
        assert threading.stack_size() == WORKER_STACK_BYTES
    assert threading.stack_size() == before


def test_the_engine_has_more_stack_for_a_grammar_than_the_process_that_checked_it() -> None:
    assert STACK_BYTES > WORKER_STACK_BYTES
