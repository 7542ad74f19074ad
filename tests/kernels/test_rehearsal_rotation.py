"""Steps that rotate inside attention, those with few rows and one row per request, give the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.runner.decode_input_buffers import DecodeInputBuffers
from engine.speculation.options import SpeculativeOptions
from kernels.attention_rows import AttentionShape
from kernels.paged_plan import PagedPlan
from kernels.triton.attention import rotated_decode
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.rehearsal import Schedule, rehearsal
from tests.support.scripted_drafter import use_scripted_drafter
from tests.support.tiny_models import saved_model

SMALL: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 16, "num_kv_blocks": 4, "max_num_batched_tokens": 16}
NUM_TOKENS = 5
REQUEST = generation_request("a", [5, 6, 7], max_tokens=NUM_TOKENS)


def served(folder: Path, *, answer: list[int] | None = None, **options: Any) -> tuple[list[int], set[bool]]:
    """Tokens of a request on a rehearsed card, and whether decode steps with drafts (True) and without (False) had layers that
    rotate inside their attention."""
    of_steps, forward_inputs = [False], DecodeInputBuffers.forward_inputs
    rotated: set[bool] = set()

    def inputs(self: DecodeInputBuffers, decoder: Any, size: int, *, has_drafts: bool) -> Any:
        of_steps[0] = has_drafts
        return forward_inputs(self, decoder, size, has_drafts=has_drafts)

    def noted(name: str) -> Any:
        launch = getattr(rotated_decode, name)

        def launched(*args: Any, **kwargs: Any) -> None:
            rotated.add(of_steps[0])
            launch(*args, **kwargs)

        return mock.patch.object(rotated_decode, name, launched)

    with (
        rehearsal(Schedule.RANDOM),
        noted("lone_decode"),
        noted("launch_decode"),
        mock.patch.object(DecodeInputBuffers, "forward_inputs", inputs),
    ):
        engine = small_engine(folder, device="cuda", dtype="float32", **SMALL, **options)
        if answer is not None:
            use_scripted_drafter(engine, answer, 3)
        found = run_to_end(engine, [REQUEST])
    assert engine.fallbacks.count == 0
    assert answer is None or engine.status().accepted_draft_tokens_total > 0
    return tokens(found["a"]), rotated


def plain(folder: Path) -> list[int]:
    return tokens(run_to_end(small_engine(folder, dtype="float32", **SMALL), [REQUEST])["a"])


@pytest.mark.parametrize(("family", "is_rotated"), [("llama", True), ("gemma3_text", True), ("olmo2", False)])
def test_a_layer_rotates_inside_attention_unless_heads_are_normalised_together(family: str, is_rotated: bool) -> None:
    model = saved_model(family, num_hidden_layers=1).directory
    assert served(model) == (plain(model), {False} if is_rotated else set())


def test_steps_of_many_rows_rotate_separately() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    plans = (PagedPlan(AttentionShape(16, 4, 2, 16), rows, none, none, is_newest=True) for rows in (1, 16, 17, 256))
    assert [plan.takes_projections for plan in plans] == [True, True, False, False]


def test_a_batch_invariant_engine_rotates_separately(llama: Path) -> None:
    found, rotated = served(llama, batch_invariant=True)
    assert (len(found), rotated) == (NUM_TOKENS, set())


def test_steps_with_several_rows_per_request_rotate_separately(llama: Path) -> None:
    expected = plain(llama)
    speculative = SpeculativeOptions.parse({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3})
    assert served(llama, answer=expected, speculative_config=speculative) == (expected, {False})
