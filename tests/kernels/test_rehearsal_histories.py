"""Random histories of an engine on an emulated GPU: captured steps launched ahead give the tokens of the plain CPU runner.

Operations are torch's (`tests.support.rehearsal.table`); the results of kernels are tested elsewhere.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.runner.cuda_graphs import CudaGraphs
from engine.speculation.options import SpeculativeOptions
from tests.support.engine_histories import (
    EngineLimits,
    PlannedRequest,
    assert_as_alone,
    engine_limits,
    planned_requests,
    repetitive_requests,
    run_history,
    with_grammars,
)
from tests.support.engines import small_engine
from tests.support.rehearsal import Schedule, rehearsal
from tests.support.rehearsal.table import replace_triton_operations
from tests.support.tiny_models import saved_first_layer, saved_model

FAMILIES = ("llama", "gemma2", "qwen3")


def speculation(draft: Path | None, num_tokens: int) -> SpeculativeOptions:
    """By prompt lookup if there is no draft model."""
    method = "ngram" if draft is None else "draft_model"
    return SpeculativeOptions(method=method, model=draft, num_speculative_tokens=num_tokens)


@settings(max_examples=8, deadline=None, derandomize=True, phases=(Phase.generate,))
@given(
    family=st.sampled_from(FAMILIES),
    requests=st.lists(planned_requests | repetitive_requests, min_size=1, max_size=9),
    depth=st.sampled_from((None, 3, 8)),
    drafts=st.booleans(),
    room=engine_limits,
    preempt_at=st.none() | st.integers(1, 12),
    max_graphs=st.sampled_from((8, 48)),
    schedule=st.sampled_from(Schedule),
    seed=st.integers(0, 99),
)
def test_tokens_equal_those_of_the_plain_runner(
    family: str,
    requests: list[PlannedRequest],
    depth: int | None,
    drafts: bool,
    room: EngineLimits,
    preempt_at: int | None,
    max_graphs: int,
    schedule: Schedule,
    seed: int,
) -> None:
    few_graphs = mock.patch("engine.runner.runner_choice.CudaGraphs", partial(CudaGraphs, max_graphs=max_graphs))
    model = saved_model(family).directory
    with rehearsal(schedule, seed=seed) as card, replace_triton_operations(), few_graphs:
        engine = small_engine(
            model,
            device="cuda",
            dtype="float32",
            **room.options,
            speculative_config=depth and speculation(saved_first_layer(family) if drafts else None, depth),
        )
        found = run_history(with_grammars(engine), requests, preempt_at=preempt_at)
    assert card.broken is None
    assert engine.fallbacks.count == 0
    assert_as_alone(model, requests, found)
