"""The memory forecast before loading, compared with engines on the CPU and, with a fake device, for a GPU."""

from __future__ import annotations

import json
import logging
import re
import resource
import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from engine.build import _log_start, build_engine
from engine.config.model import ModelConfig, load_model_config
from engine.errors import EngineConfigError
from engine.memory import estimate
from engine.memory import forecast as memory_forecast
from engine.memory.estimate import DeviceMemory
from engine.memory.forecast import MeasuredMemory, MemoryForecast, forecast_memory, format_parts, underestimated
from engine.memory.needs import GIB, MemoryNeeds
from engine.memory.shape import Load, MemoryShape
from engine.memory.splits import invariant_bytes
from engine.models.decoder import Decoder
from engine.options import CPU_KV_CACHE_BYTES, EngineOptions
from engine.protocol import MemoryPart
from engine.runner.runner_choice import resolve_step_mode
from engine.runner.slot_runner import SlotRunner
from engine.runner.slot_warm_up import KINDS
from engine.runner.token_spans import TokenSpan
from engine.scheduling.limits import STEP_DRAFT_TOKENS_MAX
from engine.speculation.options import SpeculativeOptions
from engine.start_times import StartTimes
from engine.step_mode import StepMode
from engine.step_sizes import graphs_kept, sampled_shapes
from engine.weights import WeightsSize
from kernels import ops
from tests.support import quantised_checkpoints as layouts
from tests.support.engine_messages import engine_info
from tests.support.engines import overlapped_engine, small_engine
from tests.support.published_configs import LLAMA_8B
from tests.support.tiny_models import FAMILY_SETTINGS, saved_model, saved_text_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module")
def model() -> Path:
    return saved_text_model()


@pytest.fixture
def llama_8b(tmp_path: Path) -> ModelConfig:
    """Only the configuration: a forecast loads no weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return load_model_config(tmp_path)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A fake GPU's free and total memory in GiB; tests change it."""
    memory = [139, 140]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (memory[0] * GIB, memory[1] * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return memory


@pytest.fixture
def main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with so much memory that the model fits."""
    monkeypatch.setattr(memory_forecast, "main_memory_bytes", lambda: 128 * GIB)


def forecast(config: ModelConfig, device: torch.device = GPU, **options: Any) -> MemoryForecast:
    engine_options = EngineOptions(model=Path("m"), **options)
    return forecast_memory("llama", config, engine_options, StepMode.PLAIN, dtype=torch.bfloat16, device=device)


@pytest.mark.parametrize("family", sorted(FAMILY_SETTINGS))
def test_predicted_parameters_equal_those_of_the_decoders_weight_plan(family: str) -> None:
    directory = saved_model(family).directory
    config = load_model_config(directory)
    shape = MemoryShape.of(config)
    required = WeightsSize.of(Decoder(config, dtype=torch.float32, device=CPU).weight_plan())
    assert shape.matrices + shape.embedding + shape.head + shape.others == required.num_parameters


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
def test_matrices_of_experts_are_counted_as_the_decoder_loads_them(family: str) -> None:
    config = load_model_config(saved_model(family).directory)
    destinations = Decoder(config, dtype=torch.float32, device=CPU).weight_plan().destinations
    loaded = [each for name, each in destinations.items() if ".experts." in name]
    assert MemoryShape.of(config).expert_matrices == sum(each.numel() for each in loaded if isinstance(each, torch.Tensor))


def test_engine_info_has_predicted_and_measured_memory(model: Path) -> None:
    peak_before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    engine = build_engine(EngineOptions(model=model, device="cpu", max_model_len=64, num_kv_blocks=8))
    parts = {part.name: part for part in engine.info.memory}
    assert parts["weights"].predicted_bytes == parts["weights"].measured_bytes == engine.info.weights_bytes
    assert parts["kv_cache"].predicted_bytes == parts["kv_cache"].measured_bytes == engine.info.kv_bytes
    assert parts["device_context"].predicted_bytes >= peak_before_bytes, "what the process has taken already"
    assert parts["graphs"].predicted_bytes == 0
    assert engine.info.memory_note is None


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_log_has_the_memory_parts_and_a_warning_about_a_shortened_context(
    model: Path, enforce_eager: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryForecast, "shortened_note", lambda *_: "the context is 64 tokens: llama needs more")
    with caplog.at_level(logging.INFO, logger="gatehouse.engine"):
        engine = build_engine(EngineOptions(model=model, device="cpu", num_kv_blocks=8, enforce_eager=enforce_eager))
    messages = [
        (record.levelname, record.getMessage()) for record in caplog.records if record.getMessage().startswith("memory: ")
    ]
    assert messages[0] == ("INFO", f"memory: {format_parts(engine.info.memory)}")
    assert messages[1] == ("WARNING", "memory: the context is 64 tokens: llama needs more")


@pytest.mark.parametrize(
    ("cache", "option"),
    [({"num_kv_blocks": 2}, "num_gpu_blocks_override"), ({"kv_cache_bytes": 1}, "kv_cache_bytes"), ({}, "kv_cache_bytes (by")],
    ids=["blocks", "bytes", "default of a CPU"],
)
def test_a_context_that_a_fixed_cache_shortens_is_told_with_the_option(
    cache: dict[str, int], option: str, llama_8b: ModelConfig, monkeypatch: pytest.MonkeyPatch, main_memory: None
) -> None:
    block_bytes = forecast(llama_8b, CPU).fit.needs.block_bytes
    if "kv_cache_bytes" in cache:
        cache = {"kv_cache_bytes": 2 * block_bytes}
    else:
        monkeypatch.setattr(estimate, "CPU_KV_CACHE_BYTES", 2 * block_bytes)
    note = shortened_note(llama_8b, cache)
    assert note is not None
    assert note.startswith(f"the context is 32 tokens: {option}")
    assert note.endswith(f" has room for 32 tokens, 131072 tokens need {8192 * block_bytes} bytes")


@pytest.mark.parametrize("cache", [{"num_kv_blocks": 8192}, {"num_kv_blocks": 2, "max_model_len": 20}], ids=str)
def test_a_fixed_cache_that_holds_the_context_is_not_told_of(
    cache: dict[str, int], llama_8b: ModelConfig, main_memory: None
) -> None:
    assert shortened_note(llama_8b, cache) is None


def shortened_note(config: ModelConfig, options: dict[str, Any]) -> str | None:
    return forecast(config, CPU, **options).shortened_note(config, EngineOptions(model=Path("m"), **options))


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_weights_quantised_on_the_fly_are_predicted_except_for_row_scales(model: Path, quantization: str) -> None:
    engine = build_engine(EngineOptions(model=model, device="cpu", num_kv_blocks=8, quantization=quantization))
    (weights,) = (part for part in engine.info.memory if part.name == "weights")
    assert weights.predicted_bytes == pytest.approx(weights.measured_bytes, rel=0.02)


@pytest.mark.parametrize(
    "layout",
    [layouts.awq(), layouts.gptq(), layouts.fp8(per_row=True, activations="none", compressed=True)],
    ids=["awq", "gptq", "fp8"],
)
def test_weights_of_a_quantised_checkpoint_are_predicted(layout: layouts.Layout, tmp_path: Path) -> None:
    directory = layouts.write(saved_model("llama", **layouts.SIZES).directory, tmp_path / "written", layout).directory
    (weights,) = (part for part in small_engine(directory, num_kv_blocks=8).info.memory if part.name == "weights")
    assert weights.predicted_bytes == pytest.approx(weights.measured_bytes, rel=0.05)


def test_an_fp8_cache_is_predicted(model: Path) -> None:
    engine = build_engine(EngineOptions(model=model, device="cpu", num_kv_blocks=8, kv_cache_dtype="fp8"))
    (cache,) = (part for part in engine.info.memory if part.name == "kv_cache")
    assert cache.predicted_bytes == cache.measured_bytes == engine.info.kv_bytes


@pytest.mark.parametrize("with_drafts", [False, True])
def test_block_tables_of_steps_over_slots_are_predicted(with_drafts: bool, model: Path) -> None:
    speculation = SpeculativeOptions.parse({"method": "ngram"}) if with_drafts else None
    engine = overlapped_engine(model, max_num_seqs=8, num_kv_blocks=64, kv_cache_bytes=None, speculative_config=speculation)
    assert isinstance(engine.runner, SlotRunner)
    steps = engine.runner.steps
    assert steps.chunks is not None
    kept = [steps.state.tables, steps.inputs.block_tables, steps.chunks._step._tables]
    load = Load(num_tokens=256, num_seqs=8, block_size=16, num_draft_tokens=STEP_DRAFT_TOKENS_MAX if with_drafts else 0)
    assert load.slot_tables_bytes(engine.info.max_model_len) == sum(tables.nbytes for tables in kept)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_rotary_tables_of_target_and_draft_model_are_predicted(family: str, model: Path) -> None:
    directory = saved_model(family, vocab_size=load_model_config(model).vocab_size).directory
    speculative = SpeculativeOptions.parse({"method": "draft_model", "model": str(model), "num_speculative_tokens": 2})
    for speculation in (None, speculative):
        options = EngineOptions(model=directory, device="cpu", num_kv_blocks=2, speculative_config=speculation)
        engine = build_engine(options)
        (part,) = (part for part in engine.info.memory if part.name == "rotary_tables")
        configs = [load_model_config(directory), *([load_model_config(model)] if speculation else [])]
        positions = sum(2 * rope.rotary_dim for config in configs for rope in config.ropes)
        assert part.predicted_bytes == part.measured_bytes == engine.info.max_model_len * positions * 4


def test_weights_and_cache_of_a_draft_model_are_predicted(model: Path) -> None:
    speculative = SpeculativeOptions.parse({"method": "draft_model", "model": str(model), "num_speculative_tokens": 2})
    options = EngineOptions(model=model, device="cpu", max_model_len=64, num_kv_blocks=8, speculative_config=speculative)
    parts = {part.name: part for part in build_engine(options).info.memory}
    assert parts["weights"].predicted_bytes == parts["weights"].measured_bytes
    assert parts["kv_cache"].predicted_bytes == parts["kv_cache"].measured_bytes


def test_without_an_option_a_cpu_has_its_fixed_cache(llama_8b: ModelConfig) -> None:
    found = forecast(llama_8b, CPU)
    assert 0 <= CPU_KV_CACHE_BYTES - found.predicted_kv_bytes < found.fit.needs.block_bytes


def test_memory_in_use_on_a_cpu_is_measured_after_its_kernels_are_loaded(
    llama_8b: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[object, ...]] = []
    operations = ops.operations

    def load(device: torch.device, dtype: torch.dtype) -> ops.Operations:
        loaded.append((device, dtype))
        return operations(device, dtype)

    monkeypatch.setattr(ops, "operations", load)
    monkeypatch.setattr(
        memory_forecast,
        "_memory",
        lambda *_: DeviceMemory(device_type="cpu", usable_bytes=64 * GIB, context_bytes=len(loaded) * GIB),
    )
    assert forecast(llama_8b, CPU).fit.needs.context_bytes == GIB
    assert loaded == [(CPU, torch.bfloat16)]


def cpu_needs(config: ModelConfig, **options: Any) -> MemoryNeeds:
    """The predicted needs of a float32 engine on a CPU."""
    engine_options = EngineOptions(model=Path("m"), device="cpu", **options)
    mode = resolve_step_mode(config, engine_options, dtype=torch.float32, device=CPU)
    return forecast_memory("llama", config, engine_options, mode, dtype=torch.float32, device=CPU).fit.needs


def test_buffers_of_recorded_decode_steps_count_as_activations_on_a_cpu(llama_8b: ModelConfig) -> None:
    shape = MemoryShape.of(llama_8b)
    kept = 64 * (2 * (3 * 14336 + 6 * 4096 + 80 * 128) + 2 * (4096 + 128) + 128_256) * 4
    for tokens in (512, 4096):
        options = {"max_num_batched_tokens": tokens, "max_num_seqs": 8}
        step = shape.activations_bytes(tokens, 8, 4)
        assert cpu_needs(llama_8b, **options).activations_bytes == step + kept
        assert cpu_needs(llama_8b, batch_invariant=True, **options).activations_bytes == step + kept
        assert cpu_needs(llama_8b, enforce_eager=True, **options).activations_bytes == step
        in_16_bits = forecast(llama_8b, CPU, **options).fit.needs
        assert in_16_bits.activations_bytes == shape.activations_bytes(tokens, 8, 2), "torch's operations are not recorded"


@pytest.mark.parametrize(
    ("changed", "options"), [({}, {"kv_cache_dtype": "fp8"}), ({"head_dim": 34}, {})], ids=lambda value: str(value)[:50]
)
def test_no_recorded_buffers_are_predicted_where_attention_does_not_read_pages(
    changed: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changed))
    config = load_model_config(tmp_path)
    needs = cpu_needs(config, max_num_batched_tokens=512, max_num_seqs=8, **options)
    assert needs.activations_bytes == MemoryShape.of(config).activations_bytes(512, 8, 4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "granite", "qwen3"])
def test_recorded_buffers_of_all_step_kinds_stay_within_the_prediction(family: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    directory = saved_model(family, intermediate_size=512, num_hidden_layers=3, **sizes).directory
    speculation = SpeculativeOptions.parse({"method": "ngram"})
    engine = build_engine(EngineOptions(model=directory, device="cpu", num_kv_blocks=8, speculative_config=speculation))
    assert isinstance(engine.runner, SlotRunner)
    for kind in (*KINDS, None):
        for has_drafts in (False, True):
            decodes = engine.runner.steps.decodes
            decodes.make_ready(decodes.shape(4, kind, has_drafts=has_drafts))
            decodes.step.record(kind, has_drafts=has_drafts)
    buffers = engine.runner.target._recorded._buffers  # type: ignore[union-attr]
    kept = sum(tensor.numel() for layer in buffers.layers for tensor in layer)
    shape = MemoryShape.of(load_model_config(directory))
    predicted = shape.recorded_bytes(64, 4)
    assert 0.8 * predicted < 4 * kept <= predicted


def test_on_a_gpu_the_cache_is_what_remains(llama_8b: ModelConfig, card: list[int]) -> None:
    found = forecast(llama_8b, gpu_memory_utilization=0.9, max_num_seqs=64)
    needs = found.fit.needs
    assert needs.slots_bytes == MemoryShape.of(llama_8b).splits_bytes(64, 131_072, 2)
    assert needs.rotary_bytes == 131_072 * 2 * 128 * 2
    left = int(140 * GIB * 0.9) - needs.fixed_bytes
    assert needs.context_bytes > GIB, "what others hold is not there for this engine"
    assert found.predicted_kv_bytes == left // needs.block_bytes * needs.block_bytes
    assert found.shortened_note(llama_8b, EngineOptions(model=Path("m"))) is None


def test_the_forecast_for_a_gpu_includes_the_batch_invariant_workspace(llama_8b: ModelConfig, card: list[int]) -> None:
    found = forecast(llama_8b, max_num_seqs=64, batch_invariant=True).fit
    assert found.needs.slots_bytes == invariant_bytes(64, 131_072, 32, 128, None)


@pytest.mark.parametrize("option", [{"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}, {"quantization": "int8"}], ids=str)
def test_smaller_formats_leave_room_for_more_blocks(llama_8b: ModelConfig, card: list[int], option: dict[str, Any]) -> None:
    before, after = forecast(llama_8b).fit, forecast(llama_8b, **option).fit
    assert after.needs.num_blocks(after.usable_bytes) > before.needs.num_blocks(before.usable_bytes)


def test_a_model_that_is_too_large_is_refused_with_remedies_before_loading(llama_8b: ModelConfig, card: list[int]) -> None:
    card[:] = [12, 12]
    with pytest.raises(EngineConfigError, match=r"model llama does not fit: needs 3\d\..* weights in 8 bits") as refused:
        forecast(llama_8b).check(EngineOptions(model=Path("m")))
    assert refused.value.option == "model"


def test_a_requested_context_that_does_not_fit_is_refused_and_the_default_one_is_shortened_with_a_note(
    llama_8b: ModelConfig, card: list[int]
) -> None:
    card[:] = [24, 24]
    with pytest.raises(EngineConfigError, match=r"max_model_len \(131072\) does not fit: llama needs") as refused:
        forecast(llama_8b, max_model_len=131072).check(EngineOptions(model=Path("m"), max_model_len=131072))
    assert refused.value.option == "max_model_len"
    left_open = forecast(llama_8b)
    left_open.check(EngineOptions(model=Path("m")))
    note = str(left_open.shortened_note(llama_8b, EngineOptions(model=Path("m"))))
    assert "kv_cache_dtype=fp8" in note
    assert note.startswith(f"the context is {left_open.fit.context_len} tokens")


@pytest.mark.parametrize("option", ["kv_cache_bytes", "num_kv_blocks"])
def test_a_fixed_cache_that_is_too_large_is_refused_with_the_largest_size_that_fits(
    option: str, llama_8b: ModelConfig, card: list[int]
) -> None:
    card[:] = [40, 40]
    block_bytes = forecast(llama_8b).fit.needs.block_bytes
    options: dict[str, Any] = {option: 60 * GIB if option == "kv_cache_bytes" else 60 * GIB // block_bytes}
    with pytest.raises(
        EngineConfigError, match=r"60\.0 GiB\) is too much: beside llama there is room for \d+ bytes"
    ) as refused:
        forecast(llama_8b, **options).check(EngineOptions(model=Path("m"), **options))
    assert refused.value.option == {"num_kv_blocks": "num_gpu_blocks_override"}.get(option, option)
    most = int(re.findall(r"(\d+) bytes \(\d", str(refused.value))[0])
    options = {option: most if option == "kv_cache_bytes" else most // block_bytes}
    forecast(llama_8b, **options).check(EngineOptions(model=Path("m"), **options))


def test_weights_and_a_fixed_cache_that_do_not_fit_together_are_refused(
    llama_8b: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_forecast, "main_memory_bytes", lambda: 8 * GIB)
    with pytest.raises(EngineConfigError, match=r"llama does not fit with 256\.0 MiB of keys and values: needs"):
        forecast(llama_8b, CPU).check(EngineOptions(model=Path("m")))


def test_parts_are_formatted_and_underestimated_ones_found() -> None:
    parts = [
        MemoryPart(name="weights", predicted_bytes=GIB, measured_bytes=GIB),
        MemoryPart(name="activations", predicted_bytes=GIB, measured_bytes=2 * GIB),
        MemoryPart(name="graphs", predicted_bytes=0),
        MemoryPart(name="device_context", predicted_bytes=1, measured_bytes=GIB),
    ]
    assert [part.name for part in underestimated(parts)] == ["activations"]
    assert format_parts(parts[:3]) == "weights 1.0 GiB (predicted 1.0 GiB), activations 2.0 GiB (predicted 1.0 GiB)"
    assert format_parts([replace(parts[0], measured_bytes=None)]) == "weights predicted 1.0 GiB"
    graphs = replace(parts[2], predicted_bytes=GIB, measured_bytes=GIB, num_predicted=91, num_measured=9)
    assert format_parts([graphs]) == "graphs 1.0 GiB of 9 (predicted 1.0 GiB of 91)"
    assert format_parts([replace(graphs, measured_bytes=None, num_measured=None)]) == "graphs predicted 1.0 GiB of 91"


def test_the_log_warns_of_parts_that_took_more_than_predicted(caplog: pytest.LogCaptureFixture) -> None:
    parts = [
        MemoryPart(name="activations", predicted_bytes=GIB, measured_bytes=2 * GIB),
        MemoryPart(name="slots", predicted_bytes=10 << 20, measured_bytes=11 << 20),
        MemoryPart(name="weights", predicted_bytes=100 << 20, measured_bytes=104 << 20),
        MemoryPart(name="graphs", predicted_bytes=(64 << 30) // 100, measured_bytes=(68 << 30) // 100),
    ]
    _log_start(engine_info(memory=parts), "plain", StartTimes())
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "memory: activations took 2.0 GiB, 1.0 GiB were predicted",
        "memory: slots took 11.0 MiB, 10.0 MiB were predicted",
        "memory: graphs took 0.7 GiB, 0.6 GiB were predicted",
    ]


def peak_bytes(work: Callable[[], object]) -> int:
    """The peak of the memory that `work` allocates and holds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    results = profiler.profiler.kineto_results
    found = [event for event in results.events() if event.name() == "[memory]"]
    sizes: list[int] = [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]
    return max(accumulate(sizes))


@pytest.mark.parametrize(("family", "inner"), [("llama", "intermediate_size"), ("qwen3_moe", "moe_intermediate_size")])
def test_predicted_activations_are_the_peak_of_a_forward_pass(family: str, inner: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, inner: 512}
    directory = saved_model(family, num_hidden_layers=3, max_position_embeddings=1024, **sizes).directory
    engine = small_engine(directory, kv_cache_bytes=4_000_000, max_num_batched_tokens=512)
    decoder = engine.runner.target  # type: ignore[attr-defined]
    inputs = decoder.prepare([TokenSpan([1] * 512, 0, list(range(32)), [511])])
    with torch.inference_mode():
        decoder.forward(inputs)
        # Of several: events of one nanosecond have no order, and the most at a time depends on it.
        found = statistics.median_low(peak_bytes(lambda: decoder.forward(inputs)) for _ in range(5))
    predicted = MemoryShape.of(load_model_config(directory)).activations_bytes(512, 1, 4)
    assert 0.8 * predicted < found <= 1.02 * predicted


def test_the_parts_of_a_forecast_have_a_fixed_order(llama_8b: ModelConfig, card: list[int]) -> None:
    parts = forecast(llama_8b).parts(MeasuredMemory(weights_bytes=1, kv_bytes=2, rotary_bytes=3))
    names = ["weights", "activations", "graphs", "slots", "rotary_tables", "device_context", "kv_cache"]
    assert [part.name for part in parts] == names
    assert [part.measured_bytes for part in parts] == [1, None, None, None, 3, None, 2]


def test_only_graphs_have_a_predicted_and_a_measured_count(llama_8b: ModelConfig, card: list[int]) -> None:
    taken = MeasuredMemory(weights_bytes=1, kv_bytes=2, rotary_bytes=3, graphs_bytes=4, num_graphs=9)
    options = EngineOptions(model=Path("m"), max_num_seqs=256)
    found = forecast_memory("llama", llama_8b, options, StepMode.CAPTURED, dtype=torch.bfloat16, device=GPU).parts(taken)
    numbers = {part.name: (part.num_predicted, part.num_measured) for part in found}
    assert numbers.pop("graphs") == (graphs_kept(256, 0, chunk_rows=960) + len(sampled_shapes(256)), 9)
    assert set(numbers.values()) == {(None, None)}


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_graphs_of_a_mixture_of_experts_are_predicted_with_and_without_quantisation(
    quantization: str | None, card: list[int]
) -> None:
    directory = saved_model("qwen3_moe").directory
    options = EngineOptions(model=directory, quantization=quantization)
    config = load_model_config(directory)
    needs = forecast_memory("m", config, options, StepMode.CAPTURED, dtype=torch.bfloat16, device=GPU).fit.needs
    assert needs.graphs_bytes > 0
    assert needs.slots_bytes > 0
