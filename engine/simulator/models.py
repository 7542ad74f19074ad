"""The models and GPUs that can be simulated: configurations and speeds. Knows no torch.

Bandwidth and compute of the H200 (4.30 TB/s, 790 TFLOP/s) and of the H100 80GB HBM3 (3.0 TB/s, 798 TFLOP/s) were measured: a
copy on the device, bytes read and written, and a bf16 product of 8192³. For the other cards only data sheets were available:
they are assumed to reach the same shares of theirs as the H200 of its own, 4.30 of 4.80 TB/s and 790 of 989 TFLOP/s.
Memory is what a process sees of a card, which is less than its driver reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.model import ModelConfig, load_model_config, parse_model_config
from engine.errors import EngineConfigError, UnsupportedModel
from engine.formats import check_formats, check_quantization, computed_dtype, formats_of
from engine.memory.needs import GIB
from engine.memory.shape import MemoryShape
from engine.options import EngineOptions
from engine.scheduling.step_time import DeviceSpeed, ModelShape

BLOCK_SIZE = 16
BANDWIDTH_REACHED = 4.30 / 4.80
FLOPS_REACHED = 790 / 989
PCIE_4, PCIE_5 = 22e9, 50e9
"""Bytes per second that copies between host and card reach, with 16 lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedModel:
    """A model by name. `weight_bytes`: mean size of a parameter that a step reads. `quantization` is as in
    `EngineOptions`."""

    name: str
    config: ModelConfig
    shape: ModelShape
    weight_bytes: float
    quantization: str | None = None

    @classmethod
    def of(cls, name: str, config: ModelConfig, quantization: str | None = None) -> SimulatedModel:
        """The model as an engine on a GPU reads it, in the format of its checkpoint unless another one is requested."""
        dtype = computed_dtype("auto", config.torch_dtype, "cuda")
        options = EngineOptions(model=Path(name), quantization=quantization)
        formats, shape = formats_of(config, options, dtype), ModelShape.of(config)
        total_bytes = MemoryShape.of(config).weights_bytes(formats.weights, formats.element_bytes)
        embedding_bytes = 0 if config.tie_word_embeddings else shape.head_params * formats.element_bytes
        return cls(
            name=name,
            config=config,
            shape=shape,
            weight_bytes=(total_bytes - embedding_bytes) / shape.num_params,
            quantization=quantization,
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(self.config.windows[layer.window_idx] for layer in self.config.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedGpu:
    """A GPU by name. `memory_bytes` is what a process sees; `capability` is its compute capability."""

    name: str
    speed: DeviceSpeed
    memory_bytes: int
    capability: tuple[int, int] = (9, 0)


def _gpu(
    name: str, memory_gib: float, bandwidth: float, flops: float, link_bandwidth: float, capability: tuple[int, int] = (9, 0)
) -> SimulatedGpu:
    speed = DeviceSpeed(bandwidth=bandwidth, flops=flops, link_bandwidth=link_bandwidth)
    return SimulatedGpu(name=name, speed=speed, memory_bytes=int(memory_gib * GIB), capability=capability)


def _from_data_sheet(
    name: str, memory_gib: float, bandwidth: float, flops: float, link_bandwidth: float, capability: tuple[int, int] = (9, 0)
) -> SimulatedGpu:
    """bandwidth, flops: of the data sheet, in bf16 without sparsity."""
    return _gpu(name, memory_gib, bandwidth * BANDWIDTH_REACHED, flops * FLOPS_REACHED, link_bandwidth, capability)


GPUS: dict[str, SimulatedGpu] = {
    gpu.name: gpu
    for gpu in (
        _gpu("h200", 139.0, 4.30e12, 790e12, PCIE_5),
        _gpu("h100", 79.1, 3.0e12, 798e12, PCIE_5),
        _from_data_sheet("a100", 79.1, 2.04e12, 312e12, PCIE_4, capability=(8, 0)),
        _from_data_sheet("h20", 95.0, 4.00e12, 148e12, PCIE_5),
        _from_data_sheet("b200", 178.3, 8.00e12, 2250e12, PCIE_5, capability=(10, 0)),
        _from_data_sheet("l40s", 44.4, 0.864e12, 362e12, PCIE_4, capability=(8, 9)),
        _from_data_sheet("l4", 22.0, 0.300e12, 121e12, PCIE_4, capability=(8, 9)),
        _from_data_sheet("rtx-4090", 23.5, 1.008e12, 165e12, PCIE_4, capability=(8, 9)),
    )
}


SIZES = (
    "max_position_embeddings", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size",
)  # fmt: skip


def _config(architecture: str, *sizes: int, tied: bool = False) -> dict[str, Any]:
    """A known model's `config.json`, as far as its shape goes. `sizes`: the values of `SIZES`."""
    named_sizes = dict(zip(SIZES, sizes, strict=True))
    return {"architectures": [architecture], "tie_word_embeddings": tied, "torch_dtype": "bfloat16", **named_sizes}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _config("LlamaForCausalLM", 131072, 32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.2-1b": _config("LlamaForCausalLM", 131072, 16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "qwen3-8b": _config("Qwen3ForCausalLM", 40960, 36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-4b": _config("Qwen3ForCausalLM", 40960, 36, 2560, 32, 8, 128, 9728, 151936, tied=True),
    "qwen3-0.6b": _config("Qwen3ForCausalLM", 40960, 28, 1024, 16, 8, 128, 3072, 151936, tied=True),
}
"""The configurations of known models, by name."""

MODELS: dict[str, SimulatedModel] = {
    name: SimulatedModel.of(name, parse_model_config(config, {})) for name, config in CONFIGS.items()
}


def find_gpu(name: str) -> SimulatedGpu:
    """The GPU of this name. Raises `EngineConfigError` with the known names."""
    if name.lower() not in GPUS:
        raise EngineConfigError("gpu", f"must be one of {', '.join(GPUS)}, not {name!r}")
    return GPUS[name.lower()]


def find_model(name: str, quantization: str | None = None) -> SimulatedModel:
    """A model of the table, or a model directory. Raises `EngineConfigError`, `NotAModelDirectory`, `UnsupportedModel`."""
    known = MODELS.get(name.lower())
    if known is None:
        folder = model_folder(name)
        name, config = folder.name, load_model_config(folder)
    else:
        name, config = known.name, known.config
    check_quantization(config, quantization, None)
    return SimulatedModel.of(name, config, quantization)


def model_folder(name: str) -> Path:
    """The folder of a model, named itself or by its config.json. Raises `EngineConfigError` where it does not exist."""
    path = Path(name).expanduser()
    if not path.exists():
        known_names = ", ".join(MODELS)
        raise EngineConfigError("model", f"must be one of {known_names}, or a folder with a config.json, not {name!r}")
    return path.parent if path.name == "config.json" else path


def check_card(model: SimulatedModel, gpu: SimulatedGpu) -> None:
    """Raise `EngineConfigError` for a card on which the engine would not serve the checkpoint."""
    dtype = computed_dtype("auto", model.config.torch_dtype, "cuda")
    try:
        options = EngineOptions(model=Path(model.name), quantization=model.quantization)
        check_formats(model.config, options, dtype, gpu.capability)
    except (EngineConfigError, UnsupportedModel) as error:
        raise EngineConfigError("gpu", f"{gpu.name} cannot serve this checkpoint: {error}") from error
