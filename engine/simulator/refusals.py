"""Why the engines of a machine would refuse to start, found without a device and before any weights are read. Knows no torch.

An engine makes the same checks (`engine.resolved_options`) with the memory that its device reports. Here a GPU is taken to be
empty, whether or not engines run on it, and what a process on a CPU takes before it loads a model is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.config.model import ModelConfig, load_model_config
from engine.errors import EngineConfigError, ModelError
from engine.memory.estimate import DeviceMemory, check_start, checked_estimate
from engine.memory.main_memory import check_swap_space, main_memory_bytes
from engine.options import EngineOptions
from engine.simulator.fitting import engine_fit, fit_together
from engine.simulator.models import GPUS, SimulatedGpu
from engine.text.shared_prefixes import shared_prefixes

Problem = EngineConfigError | ModelError


def gpu_of_machine(memory_bytes: int, capability: tuple[int, int]) -> SimulatedGpu:
    """A GPU with this much memory, as a process sees it, and this compute capability."""
    return replace(GPUS["h200"], name="gpu", memory_bytes=memory_bytes, capability=capability)


def start_problems(engines: Sequence[Mapping[str, Any]], gpu: SimulatedGpu | None = None) -> list[Problem | None]:
    """For each engine, given by its options, why it would refuse to start; None if it would start. All that are not for a CPU
    share `gpu`; None is a machine without a GPU, on which the memory of an engine for one is not judged."""
    problems: list[Problem | None] = [None] * len(engines)
    on_gpu: dict[int, tuple[ModelConfig, EngineOptions]] = {}
    for number, engine in enumerate(engines):
        try:
            options = EngineOptions.of(engine)
            config = load_model_config(options.model)
            device_type = "cuda" if options.device == "cuda" or (options.device == "auto" and gpu is not None) else "cpu"
            _check_memory(config, options, gpu, device_type)
            if gpu is not None and device_type == "cuda":
                on_gpu[number] = config, options
            check_swap_space(options, device_type)
            shared_prefixes(options)
        except (EngineConfigError, ModelError) as error:
            problems[number] = error
    if gpu is not None:
        fits = fit_together(list(on_gpu.values()), gpu)
        for (number, (config, options)), fit in zip(on_gpu.items(), fits, strict=True):
            try:
                check_start(config, options, fit)
            except EngineConfigError as error:
                problems[number] = problems[number] or error
    return problems


def _check_memory(config: ModelConfig, options: EngineOptions, gpu: SimulatedGpu | None, device_type: str) -> None:
    """Raise what an engine would of its formats and memory that has the machine for itself. One that passes is left its
    memory by the others, even if something else keeps it from a start."""
    if gpu is not None and device_type == "cuda":
        check_start(config, options, engine_fit(config, options, gpu))
        return
    estimate = checked_estimate(config, options, None, device_type=device_type)
    if device_type == "cpu":
        memory = DeviceMemory(device_type="cpu", usable_bytes=main_memory_bytes(), context_bytes=0)
        check_start(config, options, estimate(memory))
