"""`gatehouse plan` and simulations agree with the memory forecast of the engine, for folders and known models."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.base.settings import SettingsError, load_settings
from engine import LLM
from engine.config.model import load_model_config
from engine.device import format_name, resolve_dtype
from engine.errors import EngineConfigError, NotAModelDirectory, UnsupportedModel
from engine.formats import check_formats
from engine.memory.device import WORKSPACE_BYTES
from engine.memory.fit import MemoryFit
from engine.memory.forecast import forecast_memory
from engine.memory.needs import CONTEXT_BYTES, GIB
from engine.options import SEATS_MAX, EngineOptions
from engine.simulator.fitting import plan_together
from engine.simulator.models import MODELS, SimulatedGpu, SimulatedModel, find_gpu, find_model
from engine.simulator.replay import Replay, Setup
from engine.simulator.trace import TracedRequest
from engine.simulator.workload import Workload
from engine.step_mode import StepMode
from tests.support import quantised_checkpoints as layouts
from tests.support.planning import memory_fit
from tests.support.published_configs import LLAMA_8B

GPU = torch.device("cuda", 0)
FP8 = layouts.fp8(per_row=True, activations="dynamic", compressed=True).settings
FOLDERS: dict[str, dict[str, Any]] = {
    "plain": LLAMA_8B,
    "tied": {**LLAMA_8B, "tie_word_embeddings": True},
    "float32": {**LLAMA_8B, "torch_dtype": "float32"},
    "without a dtype": {key: value for key, value in LLAMA_8B.items() if key != "torch_dtype"},
    "awq": {**LLAMA_8B, "torch_dtype": "float16", "quantization_config": layouts.awq(group_size=128).settings},
    "awq in one group": {**LLAMA_8B, "quantization_config": layouts.awq(group_size=-1).settings},
    "gptq": {**LLAMA_8B, "quantization_config": layouts.gptq(group_size=64).settings},
    "fp8": {**LLAMA_8B, "quantization_config": FP8},
    "windowed": {**LLAMA_8B, "architectures": ["MistralForCausalLM"], "sliding_window": 4096},
    "alternating": {**LLAMA_8B, "architectures": ["Gemma2ForCausalLM"], "head_dim": 256, "sliding_window": 4096},
    "mixture": {
        **LLAMA_8B,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "mlp_only_layers": [0],
    },
}


@pytest.fixture(params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_config(tmp_path, FOLDERS[request.param])


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def engine_fit(folder: Path, gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch, **options_changed: Any) -> MemoryFit:
    """The engine's forecast on a GPU that holds nothing but the engine's own context."""
    free = gpu.memory_bytes - CONTEXT_BYTES + WORKSPACE_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, gpu.memory_bytes))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: gpu.capability)
    options, config = EngineOptions(model=folder, **options_changed), load_model_config(folder)
    dtype = resolve_dtype(options.dtype, config.torch_dtype, GPU)
    check_formats(config, options, format_name(dtype), gpu.capability)
    return forecast_memory("m", config, options, StepMode.of(options, "cuda"), dtype=dtype, device=GPU).fit


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_dtype": "fp8", "head_quantization": "int8", "gpu_memory_utilization": 0.8},
        {"max_num_seqs": 40, "max_num_batched_tokens": 640, "max_model_len": 2048, "enforce_eager": True},
    ],
    ids=["open", "formats", "load"],
)
def test_the_plan_for_a_folder_equals_the_engines_forecast(
    options: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = replace(find_gpu("h100"), memory_bytes=24 * GIB)
    planned, forecast = memory_fit(str(folder), gpu, **options), engine_fit(folder, gpu, monkeypatch, **options)
    assert planned == forecast
    assert planned.explain() == forecast.explain()


@pytest.mark.parametrize("quantization", ["int8", "fp8", "awq", "gptq", "compressed-tensors", "int4", "none"])
@pytest.mark.parametrize("name", ["plain", "awq", "gptq", "fp8", "float32"])
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_a_plan_refuses_with_the_message_of_the_engine(
    quantization: str, name: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, card = write_config(tmp_path, FOLDERS[name]), find_gpu(gpu)

    def fit_or_message(compute: Callable[[], MemoryFit]) -> MemoryFit | str:
        try:
            return compute()
        except EngineConfigError as error:
            return str(error)

    expected = fit_or_message(lambda: engine_fit(folder, card, monkeypatch, quantization=quantization))
    assert fit_or_message(lambda: memory_fit(str(folder), card, quantization=quantization)) == expected


@pytest.mark.parametrize(("memory_gib", "seats"), [(141, 256), (37.3, 64), (24, 128), (20, 32), (4, 32)])
def test_default_max_num_seqs_falls_until_each_sequence_has_enough_cache(
    memory_gib: float, seats: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, card = write_config(tmp_path, LLAMA_8B), replace(find_gpu("h200"), memory_bytes=int(memory_gib * GIB))
    left_open = memory_fit(str(folder), card)
    assert left_open.load.num_seqs == seats
    assert left_open == engine_fit(folder, card, monkeypatch)
    assert memory_fit(str(folder), card, max_num_seqs=300).load.num_seqs == 300, "what was asked for is not changed"
    assert left_open.kv_tokens >= 256 * seats or seats == 32


@pytest.mark.parametrize("memory_gib", [19, 21, 24, 29, 36])
def test_a_context_named_by_a_remedy_fits_with_the_seats_chosen_for_it(memory_gib: int, tmp_path: Path) -> None:
    folder, card = str(write_config(tmp_path, LLAMA_8B)), replace(find_gpu("h200"), memory_bytes=memory_gib * GIB)
    options_of_remedy: dict[str, dict[str, Any]] = {
        "a shorter context": {},
        "a larger share of the card (gpu_memory_utilization=0.95)": {"gpu_memory_utilization": 0.95},
        "keys and values in 8 bits (kv_cache_dtype=fp8)": {"kv_cache_dtype": "fp8"},
        "weights in 8 bits (quantization=int8 or fp8)": {"quantization": "int8"},
    }
    for words, context_len, _ in memory_fit(folder, card).remedies():
        if words in options_of_remedy:
            assert memory_fit(folder, card, max_model_len=context_len, **options_of_remedy[words]).fits


def test_a_small_gpu_fits_a_model_with_fewer_seats(tmp_path: Path) -> None:
    folder, card = write_config(tmp_path, LLAMA_8B), replace(find_gpu("h200"), memory_bytes=int(19.3 * GIB))
    assert memory_fit(str(folder), card, max_num_seqs=256).context_len == 0
    assert memory_fit(str(folder), card).context_len > 0


def test_seats_default_by_device_and_are_limited_by_the_tokens_of_a_step() -> None:
    assert [EngineOptions(model=Path("m")).seats(device) for device in ("cpu", "cuda")] == [64, 256]
    assert EngineOptions(model=Path("m"), max_num_batched_tokens=16).seats("cuda") == 16
    assert EngineOptions(model=Path("m"), max_num_seqs=40).seats("cpu") == 40


def test_the_limit_of_max_num_seqs_is_the_same_in_all_entry_points(tmp_path: Path) -> None:
    folder, gpu = str(write_config(tmp_path, LLAMA_8B)), find_gpu("h200")
    refused = f"max_num_seqs must be at most {SEATS_MAX}, not {SEATS_MAX + 1}"
    with pytest.raises(EngineConfigError, match=refused):
        memory_fit(folder, gpu, max_num_seqs=SEATS_MAX + 1)
    with pytest.raises(EngineConfigError, match=refused):
        LLM(folder, max_num_seqs=SEATS_MAX + 1)
    with pytest.raises(EngineConfigError, match=f"max_num_seqs must be between 1 and {SEATS_MAX}"):
        Setup(model=find_model("qwen3-8b"), gpu=gpu, max_num_seqs=SEATS_MAX + 1)
    data = {"data_dir": tmp_path}
    with pytest.raises(SettingsError, match=f"max_num_seqs must be a whole number from 1 to {SEATS_MAX}"):
        load_settings(options={**data, "max_num_seqs": SEATS_MAX + 1}, environ={})
    assert load_settings(options={**data, "max_num_seqs": SEATS_MAX}, environ={}).max_num_seqs == SEATS_MAX


def test_weights_of_a_four_bit_checkpoint_are_planned(tmp_path: Path) -> None:
    fit = memory_fit(str(write_config(tmp_path, FOLDERS["awq"])), replace(find_gpu("a100"), memory_bytes=12 * GIB))
    assert fit.context_len > 0
    # 3.5 GB of codes, 0.2 of scales and zeros, 2.1 of the rest
    assert fit.needs.weights_bytes / 1e9 == pytest.approx(5.81, rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_a_known_model_is_planned_like_its_checkpoint(name: str) -> None:
    fits = {kind: memory_fit(name, find_gpu("h200"), quantization=kind) for kind in (None, "none", "int8", "fp8", "int4")}
    assert fits[None] == fits["none"]
    assert fits["int8"] == fits["fp8"]
    assert fits["int4"].needs.weights_bytes < fits["int8"].needs.weights_bytes < fits["none"].needs.weights_bytes


@pytest.mark.parametrize("name", ["plain", "tied", "float32", "awq", "fp8", "windowed", "alternating", "mixture"])
def test_a_simulated_folder_has_the_planned_weights(name: str, tmp_path: Path) -> None:
    folder = str(write_config(tmp_path, FOLDERS[name]))
    simulated, planned = find_model(folder), memory_fit(folder, find_gpu("h200"))
    assert simulated.weight_bytes == pytest.approx(_bytes_per_parameter_read(planned, simulated), rel=1e-6)
    assert len(simulated.windows) == 32
    assert set(simulated.windows) == set(planned.model.windows)


@pytest.mark.parametrize("name", ["qwen3-4b", "awq", "mixture"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8"}, {"max_num_seqs": 40}], ids=str)
def test_a_simulated_engine_has_the_planned_seats_and_blocks(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = name if name in MODELS else str(write_config(tmp_path, FOLDERS[name]))
    weights_bytes = memory_fit(model, find_gpu("h200")).needs.weights_bytes
    for gpu in (find_gpu("h200"), replace(find_gpu("h200"), memory_bytes=int(weights_bytes * 1.2) + 6 * GIB)):
        planned, simulated = memory_fit(model, gpu, **options), Setup(model=find_model(model), gpu=gpu, **options)
        assert (simulated.seats, simulated.blocks * 16) == (planned.load.num_seqs, planned.kv_tokens)
        assert simulated.max_model_len == planned.context_len


def test_a_gpu_without_room_for_the_cache_is_refused_with_the_memory_needed() -> None:
    model, gpu = find_model("llama-3.1-8b"), replace(find_gpu("h200"), memory_bytes=16 * GIB)
    text = r"gpu h200 leaves llama-3\.1-8b no room: it needs at least 16\.9 GiB, and 14\.4 GiB may be used \(`gatehouse plan`"
    with pytest.raises(EngineConfigError, match=text):
        Setup(model=model, gpu=gpu)
    with pytest.raises(EngineConfigError, match="num_kv_blocks must be at least 1, not 0"):
        Setup(model=model, gpu=gpu, num_kv_blocks=0)
    assert Setup(model=model, gpu=gpu, num_kv_blocks=100).blocks == 100


@pytest.mark.parametrize("option", [{"token_budget": 5_000_000}, {"max_num_seqs": SEATS_MAX}], ids=str)
def test_the_option_that_leaves_no_room_is_named(option: dict[str, Any]) -> None:
    gpu = replace(find_gpu("h200"), memory_bytes=20 * GIB)
    ((name, value),) = option.items()
    with pytest.raises(EngineConfigError, match=f"{name} {value} leaves llama-3.1-8b no room"):
        Setup(model=find_model("llama-3.1-8b"), gpu=gpu, **option)


@pytest.mark.parametrize(("name", "tokens"), [("llama-3.1-8b", 872_320), ("qwen3-0.6b", 1_137_824)])
def test_the_cache_of_a_known_model_has_the_hand_computed_size(name: str, tokens: int) -> None:
    """Nine tenths of 139 GiB without weights, activations, graphs, slots, rotary tables and context, by bytes per token."""
    setup = Setup(model=find_model(name), gpu=find_gpu("h200"))
    assert (setup.blocks * 16, setup.seats) == (tokens, 256)


@pytest.mark.parametrize(
    ("own", "problem"),
    [
        ({}, None),
        ({"kv_cache_bytes": GIB, "max_model_len": 131_072}, r"max_model_len \(131072\) does not fit into the KV cache"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes .* is less than one KV block"),
        ({"kv_cache_bytes": 200 * GIB}, "kv_cache_bytes .* is too much"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, "max_num_batched_tokens must be at least max_num_seqs"),
    ],
    ids=str,
)
def test_plan_together_refuses_what_the_engines_refuse(own: dict[str, Any], problem: str | None, tmp_path: Path) -> None:
    """A model that is refused in any case leaves the other all memory."""
    folder = str(write_config(tmp_path, LLAMA_8B))
    first, second = plan_together([{"model": folder}, {"model": folder, **own}], find_gpu("h200"))
    assert first.problem is None
    assert (first.fit.others_bytes > 0) == (problem is None)
    assert second.problem is None if problem is None else re.search(problem, second.problem or "")


def test_sliding_windows_bound_the_cache_that_a_simulated_step_reads(tmp_path: Path) -> None:
    (tmp_path / "windowed").mkdir()
    (tmp_path / "plain").mkdir()
    folders = [write_config(tmp_path / name, FOLDERS[name]) for name in ("plain", "windowed")]
    seconds = {}
    for num_tokens in (1024, 60_000):
        workload = Workload("made", [TracedRequest(0.0, "alice", num_tokens, 20)])
        replays = [Replay(Setup(model=find_model(str(folder)), gpu=find_gpu("h200")), workload) for folder in folders]
        for replay in replays:
            replay.run()
        seconds[num_tokens] = [replay.recorder.busy_s for replay in replays]
    assert seconds[1024][0] == pytest.approx(seconds[1024][1])
    assert seconds[60_000][1] < 0.6 * seconds[60_000][0]


def test_an_unreadable_folder_and_an_unknown_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAModelDirectory, match=r"has no config\.json"):
        memory_fit(str(tmp_path), find_gpu("h200"))
    write_config(tmp_path, {**LLAMA_8B, "architectures": ["BloomForCausalLM"]})
    with pytest.raises(UnsupportedModel, match="BloomForCausalLM is not supported"):
        memory_fit(str(tmp_path / "config.json"), find_gpu("h200"))
    with pytest.raises(EngineConfigError, match=r"must be one of llama-3\.1-8b, .* or a folder"):
        memory_fit("gpt-9", find_gpu("h200"))


def _bytes_per_parameter_read(planned: MemoryFit, simulated: SimulatedModel) -> float:
    """Bytes per parameter of all weights that a step reads, which excludes an embedding without a tied head."""
    embedding = 0 if simulated.config.tie_word_embeddings else simulated.shape.head_params
    return (planned.needs.weights_bytes - embedding * planned.formats.element_bytes) / simulated.shape.num_params
