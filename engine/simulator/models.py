"""The models and GPUs that can be simulated: their shapes and speeds, and how many KV blocks fit. Knows no torch.

Bandwidth and compute of the H200 (4.30 TB/s, 790 TFLOP/s) and of the H100 80GB HBM3 (3.0 TB/s, 798 TFLOP/s) were measured: a
copy on the device, bytes read and written, and a bf16 product of 8192³. For the A100 and the H20 only data sheets were
available: they are assumed to reach the same shares of theirs as the H200 of its own, 4.30 of 4.80 TB/s and 790 of 989 TFLOP/s.
Memory is what a process sees of a card, which is less than its driver reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.model import ModelConfig, load_model_config
from engine.errors import EngineConfigError, UnsupportedModel
from engine.formats import check_formats, computed_dtype, formats_of
from engine.memory.needs import GIB
from engine.memory.shape import MemoryShape
from engine.options import EngineOptions
from engine.scheduling.step_time import DeviceSpeed, ModelShape

BLOCK_SIZE = 16
MEMORY_SHARE = 0.90
RESERVED_BYTES = 3_000_000_000
"""Activations, graphs and the device's context."""

BANDWIDTH_REACHED = 4.30 / 4.80
FLOPS_REACHED = 790 / 989


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A model by name. `weight_bytes`: of each parameter that a step reads; `total_bytes`: of all weights; `element_bytes`: of
    a number that is computed, and of one in the cache unless another size is requested. `config`: the contents of its
    directory's config.json, None for a known model."""

    name: str
    shape: ModelShape
    max_model_len: int
    weight_bytes: float = 2
    total_bytes: int = 0
    element_bytes: int = 2
    config: ModelConfig | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; empty for a known model, all of whose layers see the whole context."""
        return () if self.config is None else tuple(self.config.windows[layer.window_idx] for layer in self.config.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpu:
    """A GPU by name. `memory_bytes` is what a process sees; `capability` is its compute capability."""

    name: str
    speed: DeviceSpeed
    memory_bytes: int
    capability: tuple[int, int] = (9, 0)


def _gpu(name: str, memory_gib: float, bandwidth: float, flops: float, link_bandwidth: float) -> SimulatedGpu:
    speed = DeviceSpeed(bandwidth=bandwidth, flops=flops, link_bandwidth=link_bandwidth)
    capability = (8, 0) if name == "a100" else (9, 0)
    return SimulatedGpu(name=name, speed=speed, memory_bytes=int(memory_gib * GIB), capability=capability)


GPUS: dict[str, SimulatedGpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h200", 139.0, 4.30e12, 790e12, 50e9),
        _gpu("h100", 79.1, 3.0e12, 798e12, 50e9),
        _gpu("a100", 79.1, 2.04e12 * BANDWIDTH_REACHED, 312e12 * FLOPS_REACHED, 22e9),
        _gpu("h20", 95.0, 4.00e12 * BANDWIDTH_REACHED, 148e12 * FLOPS_REACHED, 50e9),
    )
}


def _model(name: str, max_model_len: int, *numbers: int, tied: bool = False) -> SimulatedModel:
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab = numbers
    shape = ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=vocab,
        tied=tied,
    )
    return SimulatedModel(name=name, shape=shape, max_model_len=max_model_len, total_bytes=2 * shape.num_params)


MODELS: dict[str, SimulatedModel] = {
    model.name: model
    for model in (
        _model("llama-3.1-8b", 131072, 32, 4096, 32, 8, 128, 14336, 128256),
        _model("llama-3.2-1b", 131072, 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
        _model("qwen3-8b", 40960, 36, 4096, 32, 8, 128, 12288, 151936),
        _model("qwen3-4b", 40960, 36, 2560, 32, 8, 128, 9728, 151936, tied=True),
        _model("qwen3-0.6b", 40960, 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    )
}

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Architectures by the first word of a known model's name."""


def find_gpu(name: str) -> SimulatedGpu:
    """The GPU of this name. Raises `EngineConfigError` with the known names."""
    if name.lower() not in GPUS:
        raise EngineConfigError("gpu", f"must be one of {', '.join(GPUS)}, not {name!r}")
    return GPUS[name.lower()]


def find_model(name: str) -> SimulatedModel:
    """A model of the table, or a model directory. Raises `EngineConfigError`, `NotAModelDirectory`, `UnsupportedModel`."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    return _model_of_folder(model_folder(name))


def model_folder(name: str) -> Path:
    """The folder of a model, named itself or by its config.json. Raises `EngineConfigError` where it does not exist."""
    path = Path(name).expanduser()
    if not path.exists():
        known_names = ", ".join(MODELS)
        raise EngineConfigError("model", f"must be one of {known_names}, or a folder with a config.json, not {name!r}")
    return path.parent if path.name == "config.json" else path


def config_of(model: SimulatedModel) -> dict[str, Any]:
    """The size fields that a known model's `config.json` would have."""
    shape = model.shape
    return {
        "architectures": [ARCHITECTURES[model.name.split("-")[0]]],
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": model.max_model_len,
        "torch_dtype": "bfloat16",
    }


def _model_of_folder(folder: Path) -> SimulatedModel:
    """The model of a directory as an engine reads it, in the format of its checkpoint."""
    config = load_model_config(folder)
    dtype = computed_dtype("auto", config.torch_dtype, "cuda")
    formats, shape = formats_of(config, EngineOptions(model=folder), dtype), ModelShape.of(config)
    total_bytes = MemoryShape.of(config).weights_bytes(formats.weights, formats.element_bytes)
    embedding_params = 0 if shape.tied else shape.head_params
    return SimulatedModel(
        name=folder.name,
        shape=shape,
        max_model_len=config.max_position_len,
        weight_bytes=(total_bytes - embedding_params * formats.element_bytes) / (shape.num_params - embedding_params),
        total_bytes=total_bytes,
        element_bytes=formats.element_bytes,
        config=config,
    )


def check_card(model: SimulatedModel, gpu: SimulatedGpu) -> None:
    """Raise `EngineConfigError` for a card on which the engine would not serve the checkpoint."""
    config = model.config
    if config is None:
        return
    dtype = computed_dtype("auto", config.torch_dtype, "cuda")
    try:
        check_formats(config, EngineOptions(model=Path(model.name)), dtype, gpu.capability)
    except (EngineConfigError, UnsupportedModel) as error:
        raise EngineConfigError("gpu", f"{gpu.name} cannot serve this checkpoint: {error}") from error


def kv_blocks(model: SimulatedModel, gpu: SimulatedGpu, *, kv_bytes: int) -> int:
    """KV blocks of 16 tokens that fit beside the weights. Raises `EngineConfigError` when the weights leave no room."""
    weights = model.total_bytes
    free_bytes = int(gpu.memory_bytes * MEMORY_SHARE) - weights - RESERVED_BYTES
    blocks = free_bytes // (BLOCK_SIZE * model.shape.kv_token_bytes(kv_bytes))
    if blocks < 1:
        raise EngineConfigError(
            "gpu", f"{gpu.name} has {gpu.memory_bytes} bytes; the weights of {model.name} ({weights} bytes) leave no KV block"
        )
    return blocks
