"""Options that contradict each other, the model or the device are refused by name before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import build_engine
from engine.errors import EngineConfigError, EngineError
from engine.memory import forecast as memory_forecast
from engine.memory import main_memory
from engine.memory.estimate import DeviceMemory
from engine.memory.needs import GIB
from engine.options import EngineOptions
from engine.resolved_options import ResolvedOptions
from engine.runner.text_models import load_text_model
from engine.simulator.models import find_gpu
from engine.simulator.refusals import start_problems
from engine.speculation.options import SpeculativeOptions
from engine.step_mode import StepMode
from tests.support import quantised_checkpoints as layouts
from tests.support.planning import memory_fit
from tests.support.published_configs import LLAMA_8B
from tests.support.tiny_models import saved_model, saved_text_model
from tests.support.tiny_tokenizer import VOCAB_SIZE

ENCODER = {
    "architectures": ["BertModel"], "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 19,
    "num_attention_heads": 16, "vocab_size": 60_000, "type_vocab_size": 2,
}  # fmt: skip
DRAFT_REFUSED = "field model cannot be served: quantization fp8 needs a GPU of compute capability 8.9"


@pytest.fixture(scope="module")
def model() -> Path:
    return saved_text_model()


@pytest.fixture
def no_weights_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("engine.models.loading.load_weights", load)
    monkeypatch.setattr("engine.runner.text_models.load_weights", load)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, r"max_model_len \(257\) is longer than the model's context \(256\)"),
        ({"max_model_len": 1}, r"max_model_len \(1\) is too short: a request needs at least one prompt token"),
        ({"num_kv_blocks": 1, "block_size": 1}, "num_gpu_blocks_override leaves 1 tokens of context"),
        ({"kv_cache_bytes": 2 * 2 * 2 * 12 * 4, "block_size": 1}, "kv_cache_bytes leaves 1 tokens of context"),
        (
            {"kv_cache_bytes": 100},
            r"kv_cache_bytes \(100 bytes\) is less than one KV block: no request fits\. A block of 16 tokens takes 6144 bytes, "
            r"the model's whole context \(256 tokens\) 98304 bytes$",
        ),
        (
            {"kv_cache_bytes": 100, "max_model_len": 20},
            r"kv_cache_bytes \(100 bytes\) is less than one KV block: .* 6144 bytes, max_model_len \(20 tokens\) 12288 bytes$",
        ),
        (
            {"max_model_len": 200, "num_kv_blocks": 2},
            r"max_model_len \(200\) does not fit into the KV cache: it needs 79872 bytes, "
            r"and 2 blocks of 16 tokens have 12288; lower it or give the cache more memory$",
        ),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, r"max_num_batched_tokens must be at least max_num_seqs \(8\)"),
        ({"swap_space": 1e-9}, "swap_space .* is less than one KV block"),
        ({"swap_space": 4096.0}, "swap_space .* is more than 80% of main memory"),
        ({"shared_prefixes": (Path("missing"),)}, "shared_prefixes file missing cannot be read"),
        ({"quantization": "awq"}, "quantization = 'awq' cannot be applied to an unquantised checkpoint"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_contradictory_options_are_refused_and_found_by_start_problems(
    model: Path, no_weights_may_be_read: None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineConfigError, match=f"^{message}") as refused:
        build_engine(EngineOptions(model=model, device="cpu", threads=1, **options))
    (predicted,) = start_problems([{"model": model, "device": "cpu", **options}])
    assert str(predicted) == str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 64}, "field model has a context of 64 tokens; set max_model_len to at most that"),
        ({"vocab_size": 64}, f"field model has a vocabulary of 64 tokens, the served model one of {VOCAB_SIZE}"),
    ],
)
def test_a_draft_model_with_another_vocabulary_or_a_shorter_context_is_refused(
    model: Path, no_weights_may_be_read: None, changes: dict[str, int], message: str
) -> None:
    draft = saved_model("llama", **{"vocab_size": VOCAB_SIZE, **changes}).directory
    speculative = SpeculativeOptions(method="draft_model", model=draft)
    with pytest.raises(EngineConfigError, match=f"^speculative_config {message}"):
        build_engine(EngineOptions(model=model, device="cpu", threads=1, speculative_config=speculative))


def test_a_draft_model_in_a_format_that_the_gpu_cannot_compute_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = saved_model("llama", vocab_size=VOCAB_SIZE, **layouts.SIZES).directory
    layout = layouts.fp8(per_row=True, activations="none", compressed=True)
    draft = layouts.write(plain, tmp_path / "fp8", layout).directory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    speculative = SpeculativeOptions(method="draft_model", model=draft)
    options = EngineOptions(model=model, device="cuda", quantization="int8", speculative_config=speculative)
    with pytest.raises(EngineConfigError, match=f"^speculative_config {DRAFT_REFUSED} or newer, this one has 8.6"):
        ResolvedOptions.of(options)


@pytest.mark.parametrize(
    ("changed", "usable_gib", "parts"),
    [
        (
            {"architectures": ["LlamaModel"]},
            10,
            r"weights 14\.0 GiB, activations .*; what would make it fit: .*quantization=int8",
        ),
        (ENCODER, 1, r"weights 2\.5 GiB, device context 0\.0 MiB\), and 1\.0 GiB may be used"),
    ],
    ids=["decoder", "encoder"],
)
def test_an_embedding_model_that_does_not_fit_is_refused(
    tmp_path: Path,
    no_weights_may_be_read: None,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    usable_gib: int,
    parts: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changed))
    memory = DeviceMemory(device_type="cpu", usable_bytes=usable_gib * GIB, context_bytes=0)
    monkeypatch.setattr(memory_forecast, "_memory", lambda *_: memory)
    with pytest.raises(EngineConfigError, match=rf"^model big does not fit: needs .*{parts}"):
        load_text_model(EngineOptions(model=tmp_path, name="big", device="cpu", dtype="bfloat16", max_model_len=512))


def test_remedies_for_an_embedding_model_leave_out_options_that_it_refuses(
    tmp_path: Path, no_weights_may_be_read: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only all changes together make it fit. `kv_cache_dtype` is not one of them: the model keeps no keys and values."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "architectures": ["LlamaModel"]}))
    memory = DeviceMemory(device_type="cuda", usable_bytes=3 * GIB, context_bytes=0, memory_bytes=6 * GIB, capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(memory_forecast, "_memory", lambda *_: memory)
    with pytest.raises(EngineConfigError, match=r"larger share of the card.*weights in 4 bits") as refused:
        load_text_model(EngineOptions(model=tmp_path, name="big", device="cuda", dtype="bfloat16", max_model_len=512))
    assert "kv_cache_dtype" not in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({}, {"quantization": "fp8"}, "quantization fp8 needs a GPU of compute capability 8.9 or newer, this one has 8.6"),
        ({"head_dim": 288}, {}, "head_dim must be at most 256 on a GPU, not 288"),
    ],
    ids=["fp8", "long heads"],
)
def test_an_embedding_model_that_the_gpu_cannot_compute_is_refused(
    tmp_path: Path,
    no_weights_may_be_read: None,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    options: dict[str, Any],
    message: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "architectures": ["LlamaModel"], **changed}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with pytest.raises(EngineError, match=f"^{message}"):
        load_text_model(EngineOptions(model=tmp_path, device="cuda", **options))


def test_an_invalid_environment_switch_is_refused_for_an_embedding_model(
    tmp_path: Path, no_weights_may_be_read: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_8B, "architectures": ["LlamaModel"]}))
    monkeypatch.setenv("GATEHOUSE_GRAPHS", "perhaps")
    with pytest.raises(EngineConfigError, match="GATEHOUSE_GRAPHS is 'perhaps', and can be 0 or 1"):
        load_text_model(EngineOptions(model=tmp_path, device="cpu"))


def test_shared_prefixes_are_tokenised_before_loading(model: Path, tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("You are a helpful assistant.")
    resolved = ResolvedOptions.of(EngineOptions(model=model, device="cpu", shared_prefixes=(tmp_path / "system.txt",)))
    assert len(resolved.shared_prefixes) == 2
    assert all(resolved.shared_prefixes)


def test_on_a_gpu_the_predicted_memory_plan_is_used_and_a_model_that_fits_is_accepted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 * GIB, 80 * GIB))
    monkeypatch.setattr(main_memory, "main_memory_bytes", lambda: 100 * GIB)
    resolved = ResolvedOptions.of(EngineOptions(model=model, device="cuda", swap_space=1.0))
    assert resolved.mode is StepMode.CAPTURED
    assert resolved.memory_plan(resolved.forecast.available_kv_bytes).max_model_len == 256
    with pytest.raises(EngineConfigError, match=r"^max_num_batched_tokens must be at least max_num_seqs \(64\), not 32"):
        ResolvedOptions.of(EngineOptions(model=model, device="cuda", max_num_seqs=64, max_num_batched_tokens=32))


def test_memory_fit_refuses_a_context_with_the_message_of_the_engine(model: Path) -> None:
    for length, message in ((257, "is longer than the model's context"), (1, "is too short")):
        with pytest.raises(EngineConfigError, match=rf"^max_model_len \({length}\) {message}"):
            memory_fit(str(model), find_gpu("h200"), max_model_len=length)
