"""Batch-invariant mode: log-probabilities of a request are bit-identical alone and in any batch, chunking or preemption."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.loop import Engine
from engine.protocol import TokenEvent
from engine.speculation.options import SpeculativeOptions
from kernels.torch.invariant_linear import TILE_ROWS, in_invariant_tiles, invariant_tile_sizes
from kernels.torch.linear import pack_linear
from tests.support.engines import evict_all, generation_request, preempt_all, run_to_end, small_engine
from tests.support.tiny_models import VOCAB_SIZE, WIDE_HEADS, saved_model

MAX_TOKENS = 6
ODD_SIZES: dict[str, Any] = {"hidden_size": 52, "intermediate_size": 101, "head_dim": 12}
FAMILIES: dict[str, dict[str, Any]] = {"llama": ODD_SIZES, "mistral-window": WIDE_HEADS, "gemma2": WIDE_HEADS, "qwen3_moe": {}}
"""With and without heads that compiled attention supports; decode steps of those with them are recorded."""

Bits = list[tuple[int, float, tuple[float, ...]]]


class PlannedRequest(NamedTuple):
    """One request of a batch. With `scores_prompt` it has no slot, and its steps run on the plain runner."""

    prompt: tuple[int, ...]
    temperature: float
    seed: int
    scores_prompt: bool = False


def model_of(family: str) -> Path:
    return saved_model(family, **FAMILIES[family]).directory


def tokens_and_logprobs(events: list[TokenEvent]) -> Bits:
    """Tokens with their unrounded log-probabilities."""
    pairs = [pair for event in events for pair in zip(event.token_ids, event.logprobs or [], strict=True)]
    return [(token_id, entry.logprob, tuple(entry.top_logprobs)) for token_id, entry in pairs]


def run(engine: Engine, requests: list[PlannedRequest], *, preempt_at: int | None = None) -> list[Bits]:
    events: dict[str, list[TokenEvent]] = {}
    for index, planned in enumerate(requests):
        sampling: dict[str, Any] = {
            "temperature": planned.temperature,
            "seed": planned.seed,
            "max_tokens": MAX_TOKENS,
            "logprobs": 2,
            "prompt_logprobs": 0 if planned.scores_prompt else None,
        }
        events[str(index)] = engine.submit(generation_request(str(index), planned.prompt, **sampling))
    step = 0
    while engine.has_requests:
        if step == preempt_at:
            preempt_all(engine)
            evict_all(engine)
        for event in engine.step():
            events[event.request_id].append(event)
        step += 1
    return [tokens_and_logprobs(events[str(index)]) for index in range(len(requests))]


@cache
def run_alone(family: str, planned: PlannedRequest) -> Bits:
    return run(small_engine(model_of(family), batch_invariant=True, max_num_seqs=1, enable_prefix_caching=False), [planned])[0]


planned_requests = st.builds(
    PlannedRequest,
    prompt=st.integers(1, 45).flatmap(
        lambda length: st.sampled_from((3, 50, 90)).map(
            lambda first: tuple((first + 7 * i) % VOCAB_SIZE for i in range(length))
        )
    ),
    temperature=st.sampled_from((0.0, 1.0)),
    seed=st.integers(0, 2),
    scores_prompt=st.sampled_from((False, False, True)),
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    requests=st.lists(planned_requests, min_size=1, max_size=7),
    budget=st.sampled_from((7, 16, 33, 512)),
    block_size=st.sampled_from((4, 16)),
    preempt_at=st.none() | st.integers(1, 8),
    swap_space=st.sampled_from((0.0, 0.002)),
    drafts=st.booleans(),
    enforce_eager=st.booleans(),
)
def test_logprobs_are_bit_identical_in_any_batch_chunking_and_preemption(
    family: str,
    requests: list[PlannedRequest],
    budget: int,
    block_size: int,
    preempt_at: int | None,
    swap_space: float,
    drafts: bool,
    enforce_eager: bool,
) -> None:
    config = SpeculativeOptions(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1) if drafts else None
    engine = small_engine(
        model_of(family),
        batch_invariant=True,
        max_num_seqs=7,
        max_num_batched_tokens=budget,
        block_size=block_size,
        swap_space=swap_space,
        speculative_config=config,
        enforce_eager=enforce_eager,
    )
    expected = [run_alone(family, each) for each in requests]
    assert run(engine, requests, preempt_at=preempt_at) == expected
    assert run(engine, requests) == expected, "with all prefixes cached"


def test_without_the_mode_logprobs_differ_in_some_bits() -> None:
    requests = [PlannedRequest(tuple(range(3, 3 + length)), 0.0, 0) for length in (5, 9, 33, 70)]
    together = run(small_engine(model_of("llama")), requests)
    by_chunks = run(small_engine(model_of("llama"), max_num_batched_tokens=16), requests)
    assert [[token for token, *_ in each] for each in together] == [[token for token, *_ in each] for each in by_chunks]
    assert together != by_chunks


def test_prompt_logprobs_do_not_depend_on_chunks() -> None:
    def scores(budget: int) -> list[float]:
        engine = small_engine(model_of("llama"), batch_invariant=True, max_num_batched_tokens=budget)
        request = generation_request("a", list(range(3, 60)), max_tokens=1, prompt_logprobs=1)
        return [entry.logprob for event in run_to_end(engine, [request])["a"] for entry in event.prompt_logprobs or []]

    assert len(scores(512)) == 56
    assert scores(512) == scores(16)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), [(96, 48), (768, 257), (33, 640)])
def test_a_row_has_bit_identical_products_in_any_batch(rows: int, columns: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(rows, columns, generator=generator)
        x = torch.randn(150, columns, generator=generator)
        multiply = in_invariant_tiles(pack_linear(weight.clone(), None), columns, dtype=weight.dtype, device=weight.device)
        whole = multiply(x)
        torch.testing.assert_close(whole, x @ weight.T, rtol=1e-4, atol=1e-3)
        for first, count in ((0, 1), (3, 2), (7, 5), (40, 17), (60, 70), (149, 1)):
            assert torch.equal(multiply(x[first : first + count]), whole[first : first + count])
    finally:
        torch.set_num_threads(before)


def test_tile_sizes_with_differing_results_are_not_used() -> None:
    def differs_by_size(x: torch.Tensor) -> torch.Tensor:
        return x[:, :4] * (1.0 + 1e-6 * (x.shape[0] == TILE_ROWS[0]))

    def differs_by_row(x: torch.Tensor) -> torch.Tensor:
        return x[:, :4] + torch.arange(x.shape[0])[:, None]

    kind: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    assert invariant_tile_sizes(differs_by_size, 8, **kind) == TILE_ROWS[1:]
    assert invariant_tile_sizes(differs_by_row, 8, **kind) == (1,)
