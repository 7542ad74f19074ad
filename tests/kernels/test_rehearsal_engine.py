"""The GPU serving code on an emulated GPU gives the tokens of the plain CPU runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn import functional

from engine.build import build_engine
from engine.config.pooling import PoolingConfig
from engine.errors import EngineConfigError, PromptError
from engine.loop import Engine
from engine.options import EngineOptions
from engine.runner.cuda_graphs import CudaGraphs
from engine.runner.embedder import Embedder
from engine.runner.slot_runner import SlotRunner
from engine.runner.slot_timing import SlotTiming
from engine.runner.slot_warm_up import WARM_ROWS
from engine.runner.text_models import load_text_model
from engine.sampling.columns import Kind
from engine.scheduling.limits import STEP_DRAFT_TOKENS_MAX
from engine.speculation.options import SpeculativeOptions
from kernels import ops
from kernels.triton.experts import mixture as experts
from kernels.triton.experts.tiles import SortedTokens, sort_by_expert
from tests.support import quantised_checkpoints as layouts
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.interpreted_fp8 import correct_e4m3
from tests.support.rehearsal import Schedule, rehearsal
from tests.support.rehearsal.table import replace_triton_operations
from tests.support.scripted_drafter import use_scripted_drafter
from tests.support.tiny_models import saved_model

SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 32, "num_kv_blocks": 8, "max_num_batched_tokens": 16}
PROMPTS = {"a": [5, 6, 7], "b": list(range(3, 21)), "c": [8]}


def answers(model: Path, prompts: dict[str, list[int]] = PROMPTS, **options: Any) -> dict[str, list[int]]:
    engine = small_engine(model, dtype="float32", **{**SMALL, **options})
    events = run_to_end(engine, [generation_request(name, prompt, max_tokens=4) for name, prompt in prompts.items()])
    return {name: tokens(each) for name, each in events.items()}


def test_an_engine_on_the_gpu_gives_the_tokens_of_the_plain_one(llama: Path) -> None:
    expected = answers(llama)
    with rehearsal() as card:
        assert answers(llama, device="cuda") == expected
    assert card.num_captures
    assert card.num_replays
    assert not card.computed_early


def test_with_8_bit_weights_and_cache_it_gives_the_tokens_of_the_eager_engine(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct_e4m3(monkeypatch)
    prompts, options = {"a": [5, 6, 7], "b": [8]}, {"device": "cuda", "quantization": "fp8", "kv_cache_dtype": "fp8"}
    found = []
    for schedule, is_eager in ((Schedule.EARLY, True), (Schedule.RANDOM, False)):
        with rehearsal(schedule) as card:
            found.append(answers(llama, prompts, enforce_eager=is_eager, **options))
        assert (card.num_replays == 0) is is_eager
    assert found[0] == found[1]


def steps_with(engine: Engine, **sampling: Any) -> None:
    """Three requests that decode."""
    for number in range(3):
        engine.submit(generation_request(str(number), [5, 6, 7 + number], max_tokens=20, **sampling))
    for _ in range(6):
        engine.step()


@pytest.mark.parametrize(
    "sampling",
    [
        {}, {"temperature": 1.0, "top_p": 0.9}, {"logprobs": 3}, {"presence_penalty": 1.0, "logit_bias": {7: 3.0}},
        {"bad_words_token_ids": [[5], [6, 7]]},
    ],
)  # fmt: skip
def test_a_decode_step_waits_only_for_the_tokens_of_the_previous_one(llama: Path, sampling: dict[str, Any]) -> None:
    with rehearsal() as card, replace_triton_operations():
        engine = small_engine(llama, device="cuda", dtype="float32", **{**SMALL, "max_model_len": 64})
        steps_with(engine, **sampling)
        captures, replays = card.num_captures, card.num_replays
        for _ in range(5):
            card.syncs.clear()
            engine.step()
            assert [sync.kind for sync in card.syncs] == ["event"]
            waiter, _limit = card.syncs[0].where[-2:]
            assert waiter.startswith("engine/runner/token_return.py:")
            assert waiter.endswith(" wait")
    assert card.num_captures == captures
    assert card.num_replays == replays + 5


def test_a_step_does_not_call_the_slow_current_stream_of_torch(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.current_stream` takes a tenth of the host's time of a step; an event without a stream calls it."""
    with rehearsal(), replace_triton_operations():
        engine = small_engine(llama, device="cuda", dtype="float32", **{**SMALL, "max_model_len": 64})
        steps_with(engine, temperature=1.0)
        monkeypatch.setattr(torch.cuda, "current_stream", None)
        engine.submit(generation_request("joins", [3, 4, 5, 6], max_tokens=3))
        assert all(event.error is None for event in run_to_end(engine, [])["joins"])
        assert engine.status().fallback_steps_total == 0


def test_arriving_and_ending_requests_cause_no_synchronisation(llama: Path) -> None:
    with rehearsal() as card, replace_triton_operations():
        engine = small_engine(llama, device="cuda", dtype="float32", **{**SMALL, "max_model_len": 64})
        steps_with(engine, temperature=1.0)
        card.syncs.clear()
        for number in range(3, 7):
            engine.submit(
                generation_request(str(number), list(range(3, 20 + number)), max_tokens=number, repetition_penalty=1.1)
            )
        engine.abort("1")
        run_to_end(engine, [])
    assert {sync.kind for sync in card.syncs} == {"event"}


def test_small_steps_are_captured_at_the_start_and_larger_ones_on_demand(llama: Path) -> None:
    with rehearsal() as card, replace_triton_operations():
        engine = small_engine(llama, device="cuda", dtype="float32", **{**SMALL, "max_num_seqs": 16, "num_kv_blocks": 32})
        at_start = card.num_captures
        assert at_start == 2 * 4 + 1 + 2 + 2 * 5, (
            "of 1 to 8 rows, greedy or not, of 16 that draw, two with chunks and their tokens"
        )
        for number in range(9):
            engine.submit(generation_request(str(number), [5, 6, 7 + number], max_tokens=6))
        run_to_end(engine, [])
        assert card.num_captures == at_start + 1, "of 16 greedy rows"


@pytest.mark.parametrize(
    ("method", "largest"), [(None, 16), ("ngram", 16 + STEP_DRAFT_TOKENS_MAX), ("draft_model", 16 + STEP_DRAFT_TOKENS_MAX)]
)
def test_steps_are_captured_from_large_to_small(
    method: str | None, largest: int, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory of graphs is reused by what fits in it."""
    captured: list[tuple[Any, ...]] = []
    make_ready = CudaGraphs.make_ready

    def note(graphs: CudaGraphs, key: Any, function: Callable[[], None], **options: bool) -> None:
        captured.append(key)
        make_ready(graphs, key, function, **options)

    monkeypatch.setattr(CudaGraphs, "make_ready", note)
    options: dict[str, Any] = {**SMALL, "max_num_seqs": 16, "num_kv_blocks": 32}
    if method is not None:
        draft = llama if method == "draft_model" else None
        options["speculative_config"] = SpeculativeOptions(method=method, model=draft)
    with rehearsal(), replace_triton_operations():
        small_engine(llama, device="cuda", dtype="float32", **options)
    few = [key for key in captured if key[1] <= WARM_ROWS[-1]]
    assert captured[0] == ("decode", largest, Kind(), method is not None)
    for group in {(key[0], *key[3:]) for key in few}:  # name, and whether there are drafts
        sizes = [key[1] for key in few if (key[0], *key[3:]) == group]
        assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("num_tokens", [32, 600])
def test_a_start_measures_memory_beside_the_prediction(num_tokens: int, llama: Path) -> None:
    with rehearsal(Schedule.EARLY, total_bytes=700 << 20) as card, replace_triton_operations():
        options = EngineOptions(
            model=llama,
            device="cuda",
            dtype="float32",
            max_num_seqs=8,
            max_num_batched_tokens=num_tokens,
            max_model_len=256,
        )
        info = build_engine(options).info
        assert card.allocated_bytes < 0.9 * card.total_bytes
        parts = {part.name: part for part in info.memory}
        assert info.device_name == "NVIDIA H200"
        for name in ("activations", "kv_cache"):
            taken, predicted = parts[name].measured_bytes, parts[name].predicted_bytes
            assert taken is not None
            assert taken == pytest.approx(predicted, rel=0.2), f"{name}: the largest pass of the start is a step"
        with pytest.raises(EngineConfigError, match="does not fit"):
            build_engine(replace(options, gpu_memory_utilization=0.3))


@pytest.mark.parametrize("cache", [{"num_kv_blocks": 8}, {"num_kv_blocks": None, "kv_cache_bytes": 1 << 16}])
def test_memory_of_loading_is_released_even_with_a_configured_cache_size(cache: dict[str, Any], llama: Path) -> None:
    with rehearsal(), replace_triton_operations(), mock.patch.object(torch.cuda, "empty_cache") as given_back:
        small_engine(llama, device="cuda", dtype="float32", **{**SMALL, **cache}).close()
    given_back.assert_called_once()


def test_the_progress_of_a_start_includes_kernels(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def four_are_compiled(report: Callable[[ops.Variants], None]) -> Iterator[None]:
        yield
        for num_ready in range(1, 5):
            report(ops.Variants(4, num_ready))

    monkeypatch.setattr(ops, "compiled_together", four_are_compiled)
    told: list[float] = []
    with rehearsal(runs_kernels=False):
        build_engine(EngineOptions(model=llama, device="cuda", dtype="float32", kv_cache_bytes=1 << 20), progress=told.append)
    assert told == sorted(told)
    assert told[-5:] == [0.625, 0.75, 0.875, 1.0, 1.0]
    assert max(told[:-5]) <= 0.5


@pytest.mark.parametrize("options", [{"kv_cache_dtype": "fp8"}, {"quantization": "int8"}])
def test_steps_with_8_bit_formats_are_captured(llama: Path, options: dict[str, Any]) -> None:
    with rehearsal(), replace_triton_operations():
        expected = answers(llama, device="cuda", enforce_eager=True, **options)
    with rehearsal() as card, replace_triton_operations():
        assert answers(llama, device="cuda", **options) == expected
    assert card.num_replays


SPECULATIVE = SpeculativeOptions.parse({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3})


@pytest.mark.parametrize(
    ("family", "options", "is_captured"),
    [
        ("mistral-window", {}, True),
        ("qwen3_moe", {}, False),
        ("llama", {"speculative_config": SPECULATIVE}, True),
    ],
)
def test_steps_that_need_the_host_are_not_captured(
    family: str, options: dict[str, Any], is_captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts need the host with torch's operations but not with Triton's. They run in float32 here, unlike on a GPU."""
    monkeypatch.setattr("engine.resolved_options.check_formats", lambda *_: None)
    model = saved_model(family).directory
    expected = answers(model, **options)
    with rehearsal() as card, replace_triton_operations():
        assert answers(model, device="cuda", **options) == expected
    assert bool(card.num_captures) is is_captured
    assert bool(card.num_replays) is is_captured


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_drafts_are_verified_by_captured_steps_that_wait_only_for_tokens(kv_cache_dtype: str, llama: Path) -> None:
    options = {**SMALL, "device": "cuda", "dtype": "float32", "kv_cache_dtype": kv_cache_dtype}
    requests = [generation_request(name, [5, 6, 7], max_tokens=20, logprobs=scored) for name, scored in (("a", None), ("b", 2))]
    with rehearsal(), replace_triton_operations():
        expected = run_to_end(small_engine(llama, enforce_eager=True, **options), requests)
    with rehearsal() as card, replace_triton_operations():
        engine = small_engine(llama, speculative_config=SPECULATIVE, **options)
        assert card.num_captures == 1 + 2 * len((1, 2, 4)) + 2 * len((2, 4, 8)) + 2 + 2 * len((1, 2, 4))
        use_scripted_drafter(engine, tokens(expected["a"]), 4)
        card.syncs.clear()
        found = run_to_end(engine, requests)
    assert [tokens(found[name]) for name in "ab"] == [tokens(expected["a"])] * 2
    assert engine.status().accepted_draft_tokens_total > 20
    assert engine.status().steps_total < 12
    assert engine.fallbacks.count == 0
    assert {sync.kind for sync in card.syncs} == {"event"}


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_experts_are_captured_with_kernels_that_do_not_need_the_host(quantization: str | None) -> None:
    model = saved_model("qwen3_moe", num_hidden_layers=1).directory
    with rehearsal(runs_kernels=False) as card:
        engine = small_engine(model, device="cuda", dtype="float16", quantization=quantization, **SMALL)
    assert card.num_captures
    assert "no graphs" not in engine.info.kernels


def test_padding_of_a_captured_step_is_excluded_from_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests in a step of four rows, each of which chooses three experts. Steps that are timed have no padding."""
    model = saved_model("qwen3_moe", num_hidden_layers=1, head_dim=16, vocab_size=64).directory
    with rehearsal() as card:
        seen, one = (torch.full((size,), size == 1, dtype=torch.int32, device="cuda") for size in (64, 1))

        def counted(expert_ids: torch.Tensor, num_experts: int) -> SortedTokens:
            sorted_tokens = sort_by_expert(expert_ids, num_experts)
            seen.index_add_(0, sorted_tokens.offsets[-1:].long(), one)
            return sorted_tokens

        monkeypatch.setattr(experts, "sort_by_expert", counted)
        speculative = SpeculativeOptions(method="ngram", num_speculative_tokens=1)
        engine = small_engine(model, device="cuda", dtype="float16", speculative_config=speculative, **SMALL)
        assert isinstance(engine.runner, SlotRunner)
        for num_rows in (1, 6):
            seen.zero_()
            SlotTiming(engine.runner.steps).decode(num_rows)
            assert int(seen.nonzero().max()) == 3 * num_rows
        seen.zero_()
        run_to_end(engine, [generation_request(name, [5], max_tokens=3) for name in "abc"])
        assert seen.nonzero().flatten().tolist() == [3 * 3]
    assert card.num_replays


EXPERT_LAYOUTS = {
    "fp8": (layouts.fp8(per_row=False, activations="static", compressed=False), True),
    "awq": (layouts.awq(), True),
    "gptq, columns in an order of their own": (layouts.gptq(desc_act=True), False),
}


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_quantised_experts_are_captured_unless_their_columns_are_permuted(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = saved_model("mixtral", **layouts.SIZES, num_hidden_layers=1, num_local_experts=3).directory
    layout, is_captured = EXPERT_LAYOUTS[name]
    written = layouts.write(model, tmp_path / "quantised", layout)
    with caplog.at_level("INFO"), rehearsal(runs_kernels=False) as card:
        engine = small_engine(written.directory, device="cuda", dtype="float16", **SMALL)
    assert bool(card.num_captures) == is_captured
    reason = "no graphs: experts chosen by the host"
    assert (reason in engine.info.kernels) == (reason in caplog.text) == (not is_captured)


def test_embedding_texts_use_no_more_memory_than_planned_for_a_step(llama: Path) -> None:
    with rehearsal(), replace_triton_operations():
        engine = small_engine(llama, device="cuda", dtype="float32", **SMALL)
        embedder = Embedder(engine.runner.target.text_model, PoolingConfig(mode="last", normalised=True))  # type: ignore[attr-defined]
        assert [len(batch) for batch in embedder._batches([[5] * 8] * 5)] == [2, 2, 1]
        with pytest.raises(PromptError, match="text 0 has 17 tokens; at most 16 fit"):
            embedder.check(0, [5] * 17)


def test_embeddings_equal_those_of_the_cpu(llama: Path) -> None:
    texts, vectors = [[5, 6, 7], [8, 9]], []
    for device in ("cpu", "cuda"):
        with rehearsal(), replace_triton_operations():
            model = load_text_model(EngineOptions(model=llama, device=device, dtype="float32", threads=1))
            embedder = Embedder(model, PoolingConfig(mode="last", normalised=True))
            vectors.append(torch.tensor([list(vector) for vector in embedder.embed(texts)]))
    torch.testing.assert_close(vectors[0], vectors[1])


@pytest.mark.parametrize(("device", "window", "asks"), [("cuda", None, False), ("cuda", 2, True), ("cpu", None, True)])
def test_attention_over_whole_texts_does_not_use_cudnn(
    device: str, window: int | None, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan takes tenths of a second. Texts longer than a window have a mask, which of the others only the slow one takes."""
    found, attend = set(), functional.scaled_dot_product_attention

    def attended(*given: Any, **named: Any) -> torch.Tensor:
        found.add(torch._C._get_cudnn_sdp_enabled())
        return attend(*given, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attended)
    mistral = saved_model("mistral", sliding_window=window).directory
    with rehearsal(), replace_triton_operations():
        model = load_text_model(EngineOptions(model=mistral, device=device, dtype="float32", threads=1))
        Embedder(model, PoolingConfig(mode="last")).embed([[5, 6, 7], [8, 9, 10, 11]])
    assert found == {asks}
    assert torch._C._get_cudnn_sdp_enabled()
