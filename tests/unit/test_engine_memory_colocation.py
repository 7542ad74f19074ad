"""Several models on one GPU: each engine leaves the others their part, whichever starts first. A fake device reports memory."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.model import load_model_config
from engine.errors import EngineConfigError
from engine.formats import unquantised
from engine.memory.colocation import alone
from engine.memory.device import WORKSPACE_BYTES, free_kv_bytes
from engine.memory.estimate import DeviceMemory, checked_estimate
from engine.memory.forecast import MeasuredMemory, MemoryForecast, forecast_memory
from engine.memory.needs import CONTEXT_BYTES, GIB
from engine.options import EngineOptions
from engine.step_mode import StepMode
from tests.support.published_configs import LLAMA_8B

GPU = torch.device("cuda", 0)
SMALL = {**LLAMA_8B, "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}


class FakeGpu:
    """The memory that the driver and torch's allocator report; tests change it."""

    def __init__(self) -> None:
        self.total = 80 * GIB
        self.used = self.own_context = CONTEXT_BYTES - WORKSPACE_BYTES
        self.reserved = 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    card = FakeGpu()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (card.total - card.used, card.total))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: card.reserved)
    return card


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    found = []
    for name, config in {"large": LLAMA_8B, "small": SMALL, "another": SMALL}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        found.append(folder)
    return found


def forecast(
    folder: Path, *others: Path, draft: Path | None = None, own: dict[Path, dict[str, Any]] | None = None, **options: Any
) -> MemoryForecast:
    """Forecast for `folder` beside `others`, all with `options`; `own` replaces some of them for single models."""
    if draft is not None:
        options["speculative_config"] = {"method": "draft_model", "model": str(draft)}
    model_options = [{"model": str(each), **options, **(own or {}).get(each, {})} for each in (folder, *others)]
    engine_options = EngineOptions.of({**model_options[0], "colocated_models": model_options[1:]})
    config, draft_config = load_model_config(folder), None if draft is None else load_model_config(draft)
    mode, dtype = StepMode.of(engine_options, "cuda"), torch.bfloat16
    return forecast_memory(folder.name, config, engine_options, mode, dtype=dtype, device=GPU, draft=draft_config)


def own_bytes(found: MemoryForecast) -> int:
    """All memory that this engine will hold on the GPU."""
    needs = found.fit.needs
    return needs.fixed_bytes - needs.context_bytes + CONTEXT_BYTES + found.predicted_kv_bytes


def forecast_each(folders: list[Path], **options: Any) -> list[MemoryForecast]:
    return [forecast(folder, *(other for other in folders if other != folder), **options) for folder in folders]


def test_engines_on_one_gpu_fill_it_with_caches_of_equally_many_tokens(card: FakeGpu, folders: list[Path]) -> None:
    found = forecast_each(folders)
    assert 0.98 * 0.9 * card.total < sum(own_bytes(each) for each in found) <= 0.9 * card.total
    tokens = [each.fit.kv_tokens for each in found]
    assert max(tokens) - min(tokens) <= 16
    assert tokens[0] > 100_000


@pytest.mark.parametrize(("dtype", "element_bytes"), [("auto", 2), ("float32", 4)])
def test_weights_are_estimated_in_the_requested_dtype(folders: list[Path], dtype: str, element_bytes: int) -> None:
    config, options = load_model_config(folders[0]), EngineOptions.of({"model": str(folders[0]), "dtype": dtype})
    empty = DeviceMemory(device_type="cuda", usable_bytes=80 * GIB, context_bytes=0)
    fit = alone(checked_estimate(config, options, (9, 0)), empty)
    assert fit.needs.weights_bytes == fit.model.weights_bytes(unquantised(element_bytes), element_bytes)


def test_all_seats_are_kept_while_the_cache_holds_256_tokens_for_each(folders: list[Path]) -> None:
    options = EngineOptions.of({"model": str(folders[0]), "max_model_len": 4096})
    estimate = checked_estimate(load_model_config(folders[0]), options, (9, 0))
    needs = estimate(DeviceMemory(device_type="cuda", usable_bytes=200 * GIB, context_bytes=0)).needs
    enough = DeviceMemory(device_type="cuda", usable_bytes=needs.fixed_bytes + needs.kv_bytes(256 * 256), context_bytes=0)
    assert estimate(enough).load.num_seqs == 256
    assert estimate(replace(enough, usable_bytes=enough.usable_bytes - 1)).load.num_seqs == 128


@pytest.mark.parametrize("total_gib", [80, 48], ids=["with room", "with fewer seats"])
def test_the_division_does_not_depend_on_which_engines_have_started(card: FakeGpu, folders: list[Path], total_gib: int) -> None:
    """Neither at the first start nor when an engine is restarted beside running ones."""
    card.total = total_gib * GIB
    before = forecast_each(folders)
    card.used = card.own_context + own_bytes(before[1]) + own_bytes(before[2]) - WORKSPACE_BYTES
    assert forecast_each(folders)[0].predicted_kv_bytes == before[0].predicted_kv_bytes


def test_memory_held_by_other_programs_is_not_divided(card: FakeGpu, folders: list[Path]) -> None:
    before = forecast(folders[0], folders[1])
    card.used += before.fit.others_bytes + 10 * GIB
    beside_it = forecast(folders[0], folders[1])
    assert before.predicted_kv_bytes - beside_it.predicted_kv_bytes == pytest.approx(10 * GIB, rel=0.03)


def test_memory_left_to_other_models_is_a_part_of_the_forecast(card: FakeGpu, folders: list[Path]) -> None:
    found = forecast(folders[0], folders[1])
    measured = MeasuredMemory(weights_bytes=1, kv_bytes=1, rotary_bytes=1, context_bytes=60 * GIB)
    parts = {part.name: part for part in found.parts(measured)}
    assert parts["other_models"].predicted_bytes == found.fit.others_bytes
    assert parts["device_context"].predicted_bytes == CONTEXT_BYTES
    assert parts["device_context"].measured_bytes is None, "the driver does not tell others' memory apart"


def test_a_model_that_runs_fewer_sequences_beside_others_leaves_them_more_memory(card: FakeGpu, folders: list[Path]) -> None:
    """On a small GPU a model beside others has lower limits, and so lower needs, than one alone."""
    card.total = 24 * GIB
    found = forecast_each(folders)
    assert found[0].fit.load.num_seqs < forecast(folders[0]).fit.load.num_seqs
    assert sum(own_bytes(each) for each in found) > 0.97 * 0.9 * card.total


def test_an_unreadable_model_is_left_no_memory(card: FakeGpu, folders: list[Path], tmp_path: Path) -> None:
    (folders[1] / "config.json").write_text("{}")
    assert forecast(folders[0], folders[1], tmp_path / "missing").fit == forecast(folders[0]).fit


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "larger_than_the_card": ({"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}, {}),
    "quantised_otherwise": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
        {"quantization": "int8"},
    ),
    "shorter": ({"max_position_embeddings": 4096}, {"max_model_len": 8192}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_its_own_engine_would_refuse_is_left_no_memory(name: str, card: FakeGpu, folders: list[Path]) -> None:
    """Otherwise the others would have smaller caches, or refuse to start, for an engine that never runs."""
    changes, options = REFUSED[name]
    (folders[1] / "config.json").write_text(json.dumps({**LLAMA_8B, **changes}))
    assert forecast(*folders, **options) == forecast(folders[0], folders[2], **options)


def test_a_model_with_another_vocabulary_than_the_draft_model_is_left_no_memory(card: FakeGpu, folders: list[Path]) -> None:
    (folders[1] / "config.json").write_text(json.dumps({**SMALL, "vocab_size": 1000}))
    assert forecast(*folders, draft=folders[2]) == forecast(folders[0], folders[2], draft=folders[2])


@pytest.mark.parametrize("option", ["kv_cache_bytes", "num_kv_blocks"])
def test_fixed_caches_are_not_divided_and_are_refused_if_they_do_not_fit_together(
    option: str, card: FakeGpu, folders: list[Path]
) -> None:
    options: dict[str, Any] = {option: 5000 if option == "num_kv_blocks" else 10 * GIB}
    found = forecast(folders[0], folders[1], **options)
    assert found.predicted_kv_bytes == forecast(folders[0], **options).predicted_kv_bytes
    found.check(EngineOptions(model=folders[0], **options))
    card.total = 36 * GIB
    forecast(folders[0], **options).check(EngineOptions(model=folders[0], **options))
    with pytest.raises(EngineConfigError, match="too much: beside large and the other models of this GPU there is room for"):
        forecast(folders[0], folders[1], **options).check(EngineOptions(model=folders[0], **options))


@pytest.mark.parametrize(
    "own",
    [
        {"quantization": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"max_model_len": 4096, "max_num_seqs": 8},
        {"block_size": 64},
        {"enforce_eager": True},
        {"speculative_config": {"method": "ngram"}},
    ],
    ids=str,
)
def test_each_model_is_estimated_with_its_own_options(own: dict[str, Any], card: FakeGpu, folders: list[Path]) -> None:
    found = forecast_each(folders, own={folders[0]: own})
    assert 0.98 * 0.9 * card.total < sum(own_bytes(each) for each in found) <= 0.9 * card.total
    tokens = [each.fit.kv_tokens for each in found]
    assert max(tokens) - min(tokens) <= 64


def test_memory_saved_by_one_model_is_divided_between_all(card: FakeGpu, folders: list[Path]) -> None:
    before, after = forecast_each(folders), forecast_each(folders, own={folders[0]: {"quantization": "int8"}})
    saved = sum(each.fit.needs.weights_bytes for each in before) - sum(each.fit.needs.weights_bytes for each in after)
    gained = [new.predicted_kv_bytes - old.predicted_kv_bytes for old, new in zip(before, after, strict=True)]
    assert saved > 6 * GIB
    assert min(gained) > GIB
    assert sum(gained) == pytest.approx(saved, rel=0.03)


@pytest.mark.parametrize("option", ["kv_cache_bytes", "num_kv_blocks"])
def test_a_fixed_cache_of_one_model_is_kept_and_the_rest_divided(option: str, card: FakeGpu, folders: list[Path]) -> None:
    own: dict[str, Any] = {option: 1000 if option == "num_kv_blocks" else 10 * GIB}
    found = forecast_each(folders, own={folders[1]: own})
    assert found[1].predicted_kv_bytes == (1000 * found[1].fit.needs.block_bytes if option == "num_kv_blocks" else 10 * GIB)
    assert 0.98 * 0.9 * card.total < sum(own_bytes(each) for each in found) <= 0.9 * card.total
    assert abs(found[0].fit.kv_tokens - found[2].fit.kv_tokens) <= 16


@pytest.mark.parametrize(
    "own",
    [
        {"device": "cpu"},
        {"kv_cache_bytes": 100 * GIB},
        {"kv_cache_bytes": GIB, "max_model_len": 131_072},
        {"kv_cache_bytes": 1},
        {"max_num_seqs": 8, "max_num_batched_tokens": 4},
        {"quantization": "awq"},
        {"block_size": 3},
        {"nonsense": 1},
    ],
    ids=str,
)
def test_a_model_on_the_cpu_or_with_invalid_options_is_left_no_memory(
    own: dict[str, Any], card: FakeGpu, folders: list[Path]
) -> None:
    assert forecast(*folders, own={folders[1]: own}) == forecast(folders[0], folders[2])


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 1000},
        {"max_position_embeddings": 64},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}},
    ],
    ids=str,
)
def test_a_model_with_a_refused_draft_model_is_left_no_memory(
    changes: dict[str, Any], card: FakeGpu, folders: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **changes}))
    own = {"speculative_config": {"method": "draft_model", "model": str(tmp_path)}}
    assert forecast(*folders, own={folders[1]: own}) == forecast(folders[0], folders[2])


def test_the_draft_model_of_another_model_is_left_memory_too(card: FakeGpu, folders: list[Path]) -> None:
    """It has the shape of its target here."""
    own = {"speculative_config": {"method": "draft_model", "model": str(folders[2])}}
    (alone,), (paired,) = forecast(*folders[:2]).fit.others, forecast(*folders[:2], own={folders[1]: own}).fit.others
    assert paired.needs.weights_bytes == 2 * alone.needs.weights_bytes
    assert paired.needs.block_bytes == 2 * alone.needs.block_bytes


def test_models_that_do_not_fit_together_are_refused_with_remedies_for_all(card: FakeGpu, folders: list[Path]) -> None:
    card.total = 20 * GIB
    forecast(folders[0]).check(EngineOptions(model=folders[0]))
    with pytest.raises(EngineConfigError, match=r"large does not fit: .*the other models of this GPU \d\.\d GiB") as refused:
        forecast(folders[0], folders[1]).check(EngineOptions(model=folders[0]))
    assert "for all models of this GPU: weights in 8 bits (quantization=int8 or fp8): max_model_len about" in str(refused.value)


@pytest.mark.parametrize(
    ("num_fixed", "words"),
    [
        (1, r"a smaller fixed cache of another model \(kv_cache_bytes (\d+) MiB less\)"),
        (2, r"smaller fixed caches of the other models \(kv_cache_bytes (\d+) MiB less in all\)"),
    ],
)
def test_a_smaller_fixed_cache_of_another_model_is_offered_and_suffices(
    num_fixed: int, words: str, card: FakeGpu, folders: list[Path]
) -> None:
    card.total = 60 * GIB
    fixed = {folder: {"kv_cache_bytes": 24 * GIB // num_fixed} for folder in folders[1 : 1 + num_fixed]}
    models = folders[: 1 + num_fixed]
    remedy = next(each for each in forecast(*models, own=fixed).fit.remedies() if "smaller" in each.words)
    reduction = re.fullmatch(words, remedy.words)
    assert reduction is not None
    assert remedy.context_len == LLAMA_8B["max_position_embeddings"]
    smaller = {
        folder: {"kv_cache_bytes": (24 * GIB - int(reduction[1]) * (1 << 20)) // num_fixed}
        for folder in folders[1 : 1 + num_fixed]
    }
    assert forecast(*models, own=smaller).fit.fits
    too_large = {folder: {"kv_cache_bytes": own["kv_cache_bytes"] + GIB} for folder, own in smaller.items()}
    assert not forecast(*models, own=too_large).fit.fits


def test_no_fixed_cache_is_offered_below_an_equal_part_or_its_own_context(card: FakeGpu, folders: list[Path]) -> None:
    card.total = 40 * GIB
    own: dict[str, Any] = {"kv_cache_bytes": 16 * GIB}
    (remedy,) = (each for each in forecast(*folders[:2], own={folders[1]: own}).fit.remedies() if "smaller" in each.words)
    equal = forecast(*folders[:2]).fit
    assert remedy.context_len == pytest.approx(equal.kv_tokens, rel=0.1)
    kept = forecast(*folders[:2], own={folders[1]: {**own, "max_model_len": 131_072}}).fit
    assert kept.others[0].kv_tokens >= 131_072
    for found in kept.remedies():
        assert "smaller" not in found.words or found.context_len < remedy.context_len
    unhelpful = forecast(*folders[:2], own={folders[1]: {"kv_cache_bytes": 1 * GIB}}).fit
    assert not unhelpful.fits
    assert not any("smaller" in each.words for each in unhelpful.remedies())


@pytest.mark.parametrize("others_have_started", [False, True])
def test_the_measured_cache_equals_the_prediction_whether_or_not_others_have_started(
    others_have_started: bool, card: FakeGpu, folders: list[Path]
) -> None:
    found = forecast(folders[0], folders[1])
    needs, others_bytes = found.fit.needs, found.fit.others_bytes
    card.reserved = needs.weights_bytes
    card.used += card.reserved + (others_bytes - WORKSPACE_BYTES if others_have_started else 0)
    left = free_kv_bytes(needs, 0.9, GPU, others_bytes=others_bytes)
    assert left // needs.block_bytes * needs.block_bytes == found.predicted_kv_bytes


def test_a_cache_gets_what_the_share_of_the_memory_leaves_beside_what_is_taken_and_what_steps_need(
    card: FakeGpu, folders: list[Path]
) -> None:
    needs = forecast(folders[0]).fit.needs
    card.used = needs.weights_bytes + GIB
    of_steps_bytes = needs.activations_bytes + needs.graphs_bytes + needs.slots_bytes + needs.rotary_bytes
    assert free_kv_bytes(needs, 0.5, GPU) == 40 * GIB - card.used - of_steps_bytes - (128 << 20)
    card.used = card.total
    assert free_kv_bytes(needs, 0.5, GPU) == 0
