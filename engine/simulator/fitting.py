"""Predicts whether a model fits a GPU that is not present, with the engine's own prediction of memory. Knows no torch.

A directory is read and judged by the code that an engine uses before it loads (`engine.formats`, `engine.memory.estimate`). A
known model name stands for its checkpoint in bfloat16, or in 4 bits if that is requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.model import ModelConfig, load_model_config, parse_model_config
from engine.config.quantization_keys import KEY
from engine.errors import EngineConfigError, EngineError, ModelError, NotAModelDirectory
from engine.memory.colocation import estimate_beside
from engine.memory.estimate import DeviceMemory, check_start, checked_estimate
from engine.memory.fit import MemoryFit, gib
from engine.memory.kv_plan import short_cache_reason
from engine.memory.needs import CONTEXT_BYTES, GIB
from engine.options import EngineOptions
from engine.simulator.models import CONFIGS, SimulatedGpu, model_folder

WEIGHT_FORMATS = ("none", "int8", "fp8", "int4")
"""Weight formats of a known model; for a directory, those of the engine's option `quantization`."""

MEMORY_GIB_MAX = 65536
SHORTER_CONTEXT = "the context is shorter than the model's"
FOUR_BITS = {"quant_method": "awq", "bits": 4, "group_size": 128}


class Refusal(NamedTuple):
    """A model that its engine would refuse even alone on the GPU, and why."""

    name: str
    problem: str


def plan_beside(
    model: str, beside: Sequence[str], gpu: SimulatedGpu, *, quantization: str | None = None, **engine_options: Any
) -> tuple[MemoryFit, list[Refusal]]:
    """The memory on `gpu` of an engine that serves `model`, a directory or a known name, with these options of `EngineOptions`,
    beside other models, which are served from the same GPU with the same options; and those of them that are left no memory
    because their engines would refuse them.

    Raises `EngineConfigError`, naming the option, `NotAModelDirectory` or `UnsupportedModel`, as that engine would.
    """
    counted, refused = [_configured(model, quantization, engine_options)], []
    for other in beside:
        try:
            config, options = _configured(other, quantization, engine_options)
            check_start(config, options, engine_fit(config, options, gpu))
        except NotAModelDirectory:
            raise
        except (EngineConfigError, ModelError) as error:
            refused.append(Refusal(Path(other).name, str(error)))
        else:
            counted.append((config, options))
    fit, (config, options) = fit_together(counted, gpu)[0], counted[0]
    if fit.fits or (fit.context_len and options.max_model_len is None):
        check_start(config, options, fit)
    return fit, refused


class PlannedModel(NamedTuple):
    """How a model fits. `problem`: why its engine would refuse it there, None if it would not. `note`: that the size of
    its cache makes its context shorter than the model's, None if it does not."""

    name: str
    fit: MemoryFit
    problem: str | None = None
    note: str | None = None


def plan_together(engines: Sequence[Mapping[str, Any]], gpu: SimulatedGpu) -> list[PlannedModel]:
    """How the models of these engines, each given by its options, fit on `gpu` together; those for a CPU are left out. One that
    its engine refuses even alone takes nothing from the others, and is planned alone. Raises `EngineError`, naming the model,
    where `plan_beside` raises."""
    configured, alone = [], []
    for engine in engines:
        try:
            options = EngineOptions.of(engine)
            if options.device != "cpu":
                configured.append((load_model_config(options.model), options))
                alone.append(_planned(*configured[-1], engine_fit(*configured[-1], gpu)))
        except EngineError as error:
            raise EngineError(f"model {Path(engine['model']).name}: {error}") from error
    together = [engine_config for engine_config, model in zip(configured, alone, strict=True) if model.problem is None]
    fits = iter(fit_together(together, gpu))
    return [
        model if model.problem is not None else _planned(*engine_config, next(fits))
        for engine_config, model in zip(configured, alone, strict=True)
    ]


def _planned(config: ModelConfig, options: EngineOptions, fit: MemoryFit) -> PlannedModel:
    try:
        check_start(config, options, fit)
    except EngineConfigError as error:
        problem = str(error) if error.option == "model" else f"model {options.model.name}: {error}"
        return PlannedModel(options.model.name, fit, problem)
    reason = short_cache_reason(config, options, fit) if fit.fits else None
    return PlannedModel(options.model.name, fit, note=None if reason is None else f"{SHORTER_CONTEXT}: {reason}")


def fit_together(engines: Sequence[tuple[ModelConfig, EngineOptions]], gpu: SimulatedGpu) -> list[MemoryFit]:
    """How these models fit on `gpu` together. Raises as `plan_beside` does."""
    estimates = [checked_estimate(config, options, gpu.capability) for config, options in engines]
    fits = []
    for own, (_, options) in enumerate(engines):
        others = [estimate for other, estimate in enumerate(estimates) if other != own]
        fits.append(estimate_beside(estimates[own], others, _empty_gpu(options, gpu)))
    return fits


def _configured(model: str, quantization: str | None, options: Mapping[str, Any]) -> tuple[ModelConfig, EngineOptions]:
    known_config = CONFIGS.get(model.lower())
    if known_config is None:
        folder = model_folder(model)
        config = load_model_config(folder)
    else:
        folder, quantized = Path(model), _quantization_config(quantization or "none")
        quantization = quantization if quantization in ("int8", "fp8") else None
        config = parse_model_config({**known_config, **quantized}, {})
    return config, EngineOptions(model=folder, device="cuda", quantization=quantization, **options)


def engine_fit(config: ModelConfig, options: EngineOptions, gpu: SimulatedGpu) -> MemoryFit:
    """The memory on `gpu` of an engine with these options. Raises as `plan_beside` does."""
    return checked_estimate(config, options, gpu.capability)(_empty_gpu(options, gpu))


def _empty_gpu(options: EngineOptions, gpu: SimulatedGpu) -> DeviceMemory:
    return DeviceMemory(
        device_type="cuda",
        usable_bytes=int(gpu.memory_bytes * options.gpu_memory_utilization),
        context_bytes=CONTEXT_BYTES,
        capability=gpu.capability,
        memory_bytes=gpu.memory_bytes,
    )


def with_memory(gpu: SimulatedGpu, memory_gib: float | None) -> SimulatedGpu:
    """`gpu` with this much memory; None leaves it as it is. Raises `EngineConfigError`."""
    if memory_gib is None:
        return gpu
    if not 0 < memory_gib <= MEMORY_GIB_MAX:
        raise EngineConfigError("memory_gib", f"must be above 0 and at most {MEMORY_GIB_MAX}, not {memory_gib:g}")
    return replace(gpu, memory_bytes=int(memory_gib * GIB))


def _quantization_config(quantization: str) -> dict[str, Any]:
    if quantization not in WEIGHT_FORMATS:
        raise EngineConfigError("quantization", f"must be one of {', '.join(WEIGHT_FORMATS)}, not {quantization!r}")
    return {KEY: FOUR_BITS} if quantization == "int4" else {}


def fit_report(fit: MemoryFit) -> dict[str, Any]:
    """The memory of each part of the model, and what remains for keys and values."""
    needs, num_blocks = fit.needs, fit.num_blocks
    return {
        "memory_bytes": fit.memory_bytes,
        "gpu_memory_utilization": fit.share,
        "usable_bytes": fit.usable_bytes,
        "weights_bytes": needs.weights_bytes,
        "activations_bytes": needs.activations_bytes,
        "graphs_bytes": needs.graphs_bytes,
        "slots_bytes": needs.slots_bytes,
        "rotary_tables_bytes": needs.rotary_bytes,
        "device_context_bytes": needs.context_bytes - fit.others_bytes,
        "other_models_bytes": fit.others_bytes,
        "kv_cache_bytes": num_blocks * needs.block_bytes,
        "num_kv_blocks": num_blocks,
        "kv_tokens": fit.kv_tokens,
        "max_num_seqs": fit.load.num_seqs,
        "max_model_len": fit.context_len,
        "requests_of_that_length": fit.kv_tokens // fit.context_len,
        "note": None if fit.fits else f"{SHORTER_CONTEXT}: {fit.explain()}",
        "remedies": [{"change": remedy.words, "max_model_len": remedy.context_len} for remedy in fit.remedies()],
    }


def readable_report(fit: MemoryFit) -> dict[str, Any]:
    """As `fit_report`, for people: memory in GiB, and a note without the remedies, which are printed below it."""
    left_out = {"note", "remedies", *(() if fit.others else ("other_models_bytes",))}
    report = {name: value for name, value in fit_report(fit).items() if name not in left_out}
    words = {name.removesuffix("_bytes"): gib(value) if name.endswith("_bytes") else value for name, value in report.items()}
    return {**words, "note": None if fit.fits else f"{SHORTER_CONTEXT}: {fit.explain(in_lines=True).splitlines()[0]}"}
