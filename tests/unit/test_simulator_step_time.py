"""The step-time model against hand-computed figures, and the step budget against the model."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest

from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest
from engine.scheduling.step_budget import PLANNED_SHARE, SCALE_MAX, BudgetTargets, StepBudget
from engine.scheduling.step_time import Efficiency, ModelShape, StepTimeModel
from engine.simulator.models import GPUS, MODELS

H200 = GPUS["h200"]
LLAMA = MODELS["llama-3.1-8b"]
PERFECT = Efficiency(bandwidth=1.0, flops=1.0, host_s=0.0)


def llama_model(kv_bytes: int = 2) -> StepTimeModel:
    return StepTimeModel(LLAMA.shape, H200.speed, kv_bytes=kv_bytes)


def step_s(model: StepTimeModel, decodes: int, context: int, start: int = 0, chunk: int = 0) -> float:
    return model.step_s(
        num_tokens=decodes + chunk,
        num_rows=decodes + (1 if chunk else 0),
        context_tokens=decodes * context + start * bool(chunk),
        attention_pairs=chunk * (start + chunk / 2),
    )


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("llama-3.1-8b", 7.505, 131072),
        ("qwen3-8b", 7.568, 147456),
        ("qwen3-0.6b", 0.596, 114688),
        ("llama-3.2-1b", 1.236, 32768),
        ("qwen3-4b", 4.022, 147456),
    ],
)
def test_model_sizes_equal_hand_computed_ones(name: str, billions: float, kv_bytes: int) -> None:
    """Parameters without an embedding of its own."""
    shape = MODELS[name].shape
    assert shape.num_params / 1e9 == pytest.approx(billions, abs=6e-4)
    assert shape.kv_token_bytes(2) == kv_bytes
    assert MODELS[name].weight_bytes == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize(("batch", "context", "ms"), [(64, 1024, 5.5), (64, 4096, 11.5), (256, 1024, 12.9), (256, 4096, 36.8)])
def test_decode_steps_at_the_roofline_equal_hand_computed_ones(batch: int, context: int, ms: float) -> None:
    model = StepTimeModel(LLAMA.shape, H200.speed, efficiency=PERFECT)
    assert step_s(model, batch, context) * 1000 == pytest.approx(ms, abs=0.06)


@pytest.mark.parametrize(("prompt", "tokens_per_s"), [(1024, 55.5e3), (8192, 49.0e3), (32768, 35.0e3)])
def test_prefill_at_the_roofline_equals_hand_computed_figures(prompt: int, tokens_per_s: float) -> None:
    model = StepTimeModel(LLAMA.shape, H200.speed, efficiency=PERFECT)
    assert prompt / step_s(model, 0, 0, 0, prompt) == pytest.approx(tokens_per_s, rel=0.015)


def test_a_draft_model_adds_the_steps_of_the_deepest_draft() -> None:
    model, requests = llama_model(), [cast("Request", SimpleNamespace()) for _ in range(3)]
    decodes = [ScheduledRequest(request, 100, 1 + k, True, k) for request, k in zip(requests, (0, 2, 5), strict=True)]
    batch = ScheduledBatch(decodes=decodes, num_tokens=10, num_draft_tokens=7)
    plain_s = model.batch_s(batch)
    model.draft_step_s = 0.001
    assert model.batch_s(batch) == pytest.approx(plain_s + 0.005)
    without = ScheduledBatch(decodes=decodes[:1], num_tokens=1)
    assert model.batch_s(without) == llama_model().batch_s(without)


def test_fp8_keys_and_values_halve_the_time_per_context_token() -> None:
    assert llama_model(kv_bytes=1).context_s == llama_model().context_s / 2


def test_few_tokens_read_the_weights_of_few_experts() -> None:
    shape = ModelShape(
        num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128, vocab_size=100,
        num_experts=8, num_chosen_experts=2,
    )  # fmt: skip
    model = StepTimeModel(shape, H200.speed)
    one, all_of_them = model.weights_s(1) - model.dense_weights_s, model.expert_weights_s
    assert one == pytest.approx(all_of_them / 4)
    assert model.weights_s(1000) == pytest.approx(model.dense_weights_s + all_of_them)


def test_token_costs_are_the_slopes_of_the_step_time() -> None:
    model, costs = llama_model(), llama_model().token_costs()
    assert costs.decode_ps(1, 1000) == pytest.approx(
        (model.token_s + model.sampled_row_s + 1000 * model.context_s) * 1e12, abs=1000
    )
    longer = step_s(model, 200, 1000, 5000, 2000) - step_s(model, 200, 1000, 5000, 1000)
    assert costs.prefill_ns(6000, 1000) == pytest.approx(longer * 1e9, rel=1e-3)


def chunk_tokens(budget: StepBudget, decodes: int, sum_context: int, start: int = 0) -> int:
    """Prefill tokens from position `start` that a step with these decodes may compute."""
    budget.begin_step(decodes, sum_context)
    return budget.chunk(start, 1 << 30)


@pytest.mark.parametrize("decodes", [1, 30, 100, 200])
@pytest.mark.parametrize("start", [0, 3000, 100_000])
def test_a_step_with_a_chunk_takes_as_long_as_the_target(decodes: int, start: int) -> None:
    model = llama_model()
    chunk = chunk_tokens(StepBudget(model, BudgetTargets(target_s=0.025)), decodes, decodes * 1000, start)
    assert step_s(model, decodes, 1000, start, chunk) <= PLANNED_SHARE * 0.025
    assert step_s(model, decodes, 1000, start, chunk + 1) > PLANNED_SHARE * 0.025


def test_several_chunks_share_the_time_of_one_step() -> None:
    model = llama_model()
    budget = StepBudget(model)
    budget.begin_step(50, 50_000)
    chunks = [(start, budget.chunk(start, 200)) for start in (0, 40_000, 0, 500, 900, 0)]
    assert chunks[0] == (0, 200)
    assert chunks[-1] == (0, 0)
    lasted_s = model.step_s(
        num_tokens=50 + sum(count for _, count in chunks),
        num_rows=50,
        context_tokens=50_000 + sum(start for start, count in chunks if count),
        attention_pairs=sum(count * (start + count / 2) for start, count in chunks),
    )
    assert 0.024 < lasted_s <= 0.0245


@pytest.mark.parametrize("seed", range(60))
def test_the_last_chunk_gets_the_time_that_other_chunks_leave(seed: int) -> None:
    rng, model = random.Random(seed), llama_model()
    num_decodes, scale = rng.choice((1, 3, 40, 200)), rng.uniform(0.5, 2.0)
    sum_context = num_decodes * rng.choice((0, 100, 2000))
    budget = StepBudget(model, BudgetTargets(target_s=rng.choice((0.012, 0.025, 0.1)), chunk_tokens_min=1))
    budget.chunk_scale = scale
    budget.begin_step(num_decodes, sum_context)
    chunks = [(start, budget.chunk(start, rng.randint(1, 500))) for start in rng.choices((0, 900, 20_000), k=rng.randint(0, 3))]
    last_start = rng.choice((0, 5000, 60_000))
    last = budget.chunk(last_start, 1 << 30)

    def lasts_s(num_tokens: int) -> float:
        parts = [(start, count) for start, count in (*chunks, (last_start, num_tokens)) if count]
        return model.step_s(
            num_tokens=num_decodes + sum(count for _, count in parts),
            num_rows=num_decodes + 1,
            context_tokens=sum_context + sum(start for start, _ in parts),
            attention_pairs=sum(count * (start + count / 2) for start, count in parts),
        )

    limit_s = PLANNED_SHARE * budget.targets.target_s / scale
    assert last in (0, 1) or lasts_s(last) <= limit_s * (1 + 1e-9)
    assert lasts_s(last + 1) > limit_s


def test_a_chunk_that_fills_its_step_is_rounded_down_to_a_captured_size() -> None:
    model, sizes = llama_model(), [256, 320, 384, 448, 512, 640, 768, 896]
    free, sized = StepBudget(model), StepBudget(model, sizes=sizes)
    for num_decodes in (1, 50, 100, 200, 256):
        room = chunk_tokens(free, num_decodes, num_decodes * 1000)
        chunk = chunk_tokens(sized, num_decodes, num_decodes * 1000)
        assert chunk <= room
        assert chunk + num_decodes == max(size for size in sizes if size <= room + num_decodes)
        assert sized.chunk(0, 1 << 30) == 0, "the step is full"


def test_chunks_that_do_not_fill_a_step_and_steps_beyond_all_sizes_are_not_rounded() -> None:
    model = llama_model()
    sized = StepBudget(model, sizes=[256, 320])
    sized.begin_step(50, 50_000)
    assert [sized.chunk(0, 37), sized.chunk(0, 38)] == [37, 38]
    assert chunk_tokens(sized, 50, 50_000) == chunk_tokens(StepBudget(model), 50, 50_000) > 1.25 * 320
    small = StepBudget(model, BudgetTargets(target_s=0.011, chunk_tokens_min=64), sizes=[256, 320])
    room = chunk_tokens(StepBudget(model, BudgetTargets(target_s=0.011)), 220, 220 * 500)
    assert 36 < room < 100, "with decodes more than 256"
    assert chunk_tokens(small, 220, 220 * 500) == max(room, 64), "36 tokens are not worth a chunk"


def test_prefill_gets_a_minimal_chunk_if_decodes_alone_fill_the_step() -> None:
    budget = StepBudget(llama_model(), BudgetTargets(target_s=0.025, chunk_tokens_min=64))
    budget.begin_step(256, 256 * 3000)
    assert [budget.chunk(0, 1000), budget.chunk(0, 1000)] == [64, 0]


def test_a_step_without_decodes_may_last_as_long_as_the_largest_gap() -> None:
    targets = BudgetTargets(target_s=0.025, gap_max_s=0.05)
    budget = StepBudget(llama_model(), targets)
    assert chunk_tokens(budget, 0, 0) > 1.7 * chunk_tokens(budget, 1, 1)


def test_the_budget_shrinks_if_the_device_is_slower_than_predicted() -> None:
    budget = StepBudget(llama_model())
    before = chunk_tokens(budget, 10, 10_000)
    for _ in range(500):
        budget.observe(0.01, 0.02, has_chunk=True)
    assert budget.chunk_scale == pytest.approx(2.0, abs=0.01)
    assert chunk_tokens(budget, 10, 10_000) < before / 2


def test_a_single_outlier_changes_the_scale_little() -> None:
    budget = StepBudget(llama_model())
    budget.observe(0.01, 1e9, has_chunk=True)
    assert budget.chunk_scale < 1 + SCALE_MAX / 60
    budget.observe(0.0, 1.0, has_chunk=True)


def test_decodes_faster_than_predicted_do_not_enlarge_chunks() -> None:
    budget = StepBudget(llama_model())
    before = chunk_tokens(budget, 64, 64 * 300)
    for _ in range(400):
        budget.observe(0.005, 0.004, has_chunk=False)
    assert budget.decode_scale == pytest.approx(0.8, abs=0.01)
    assert chunk_tokens(budget, 64, 64 * 300) == before


def test_slow_chunks_do_not_make_decodes_crowded() -> None:
    budget = StepBudget(llama_model(), BudgetTargets(target_s=0.025))
    for _ in range(400):
        budget.observe(0.01, 0.02, has_chunk=True)
    assert not budget.is_crowded(256, 256 * 1000)


def test_a_step_is_crowded_when_decodes_nearly_fill_it() -> None:
    budget = StepBudget(llama_model(), BudgetTargets(target_s=0.025))
    assert not budget.is_crowded(0, 0)
    assert not budget.is_crowded(256, 256 * 1000)
    assert budget.is_crowded(128, 128 * 4000)


@pytest.mark.parametrize(("num_decodes", "scale"), [(1, 1.0), (8, 0.5), (60, 1.0), (250, 2.0)])
def test_a_step_is_crowded_from_nine_tenths_of_the_target_on(num_decodes: int, scale: float) -> None:
    model = llama_model()
    budget = StepBudget(model, BudgetTargets(target_s=0.025))
    budget.decode_scale = scale
    limit_s = 0.9 * 0.025 / scale
    least_s = model.step_s(num_tokens=1, num_rows=0, context_tokens=0, attention_pairs=0)
    free_s = max(limit_s, 2 * least_s) - model.step_s(
        num_tokens=num_decodes, num_rows=num_decodes, context_tokens=0, attention_pairs=0
    )
    sum_context = int(free_s / model.context_s)
    assert not budget.is_crowded(num_decodes, sum_context - 1)
    assert budget.is_crowded(num_decodes, sum_context + 1)


def test_an_unreachable_target_still_allows_concurrent_requests() -> None:
    budget = StepBudget(llama_model(), BudgetTargets(target_s=0.001))
    assert not budget.is_crowded(32, 32 * 1000)
    assert budget.is_crowded(200, 200 * 2000)
