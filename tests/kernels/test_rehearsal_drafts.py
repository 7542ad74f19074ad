"""Draft tokens of one request are attended in groups; the tokens equal those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engine.runner.decode_step import DecodeStep
from engine.speculation.options import SpeculativeOptions
from kernels import ops
from kernels.triton.attention import prefill as attention_prefill
from kernels.triton.attention.decode import paged_decode
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.rehearsal import Schedule, rehearsal
from tests.support.scripted_drafter import use_scripted_drafter

SMALL: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 32, "num_kv_blocks": 8, "max_num_batched_tokens": 16}
SPECULATIVE = SpeculativeOptions.parse({"method": "ngram", "num_speculative_tokens": 9, "prompt_lookup_max": 3})


def test_a_context_is_read_once_for_several_drafts(llama: Path) -> None:
    requests = [generation_request("a", [5, 6, 7], max_tokens=20), generation_request("b", [8], max_tokens=3)]
    expected = run_to_end(small_engine(llama, dtype="float32", **SMALL), requests)
    decode = mock.Mock(wraps=paged_decode)
    with rehearsal(Schedule.RANDOM) as card:
        engine = small_engine(llama, device="cuda", dtype="float32", speculative_config=SPECULATIVE, **SMALL)
        use_scripted_drafter(engine, tokens(expected["a"]), 10)
        with mock.patch.object(attention_prefill, "paged_decode", decode):
            found = run_to_end(engine, requests)
    assert {name: tokens(each) for name, each in found.items()} == {name: tokens(each) for name, each in expected.items()}
    assert engine.status().accepted_draft_tokens_total > 9
    assert engine.fallbacks.count == 0
    assert card.num_replays
    grouped = [call for call in decode.call_args_list if len(call.args[0]) == len(call.args[2]) > 8]
    assert grouped, "steps have room for as many groups as rows"
    assert all(call.kwargs["max_query_len"] == 8 for call in grouped)


def test_kernels_of_all_draft_step_sizes_are_requested_before_the_first_launch(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, bool]] = []
    is_asking = False
    step = DecodeStep.__call__

    @contextmanager
    def compiled_together(_: Callable[[ops.Variants], None]) -> Iterator[None]:
        nonlocal is_asking
        is_asking = True
        yield
        is_asking = False

    def note(self: DecodeStep, size: int, *given: Any, has_drafts: bool = False) -> None:
        if is_asking:
            asked.append((size, has_drafts))
        step(self, size, *given, has_drafts=has_drafts)

    monkeypatch.setattr(ops, "compiled_together", compiled_together)
    monkeypatch.setattr(DecodeStep, "__call__", note)
    with rehearsal(runs_kernels=False):
        small_engine(llama, device="cuda", dtype="float32", speculative_config=SPECULATIVE, **{**SMALL, "max_num_seqs": 8})
    assert sorted({size for size, has_drafts in asked if has_drafts}) == [2, 4, 8, 16, 32, 64, 72]
