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


def gpu_of_machine(memory_bytes: int, capability: tuple[int, int] | None) -> SimulatedGpu:
    """A GPU with this much memory. A capability that is unknown is taken to be one that supports every format."""
    known = GPUS["h200"]
    return replace(known, name="gpu", memory_bytes=memory_bytes, capability=capability or known.capability)


def start_problems(engines: Sequence[Mapping[str, Any]], gpu: SimulatedGpu | None = None) -> list[Problem | None]:
    """For each engine, given by its options, why it would refuse to start; None if it would start. All that are not for a CPU
    share `gpu`; None is a machine without a GPU, on which the memory of an engine for one is not judged."""
    problems: list[Problem | None] = [None] * len(engines)
    on_gpu: dict[int, tuple[ModelConfig, EngineOptions]] = {}
    for number, engine in enumerate(engines):
        try:
            options = EngineOptions.of(engine)
            config = load_model_config(options.model)
            if _check_alone(config, options, gpu):
                on_gpu[number] = config, options
        except (EngineConfigError, ModelError) as error:
            problems[number] = error
    if gpu is not None:
        fits = fit_together(list(on_gpu.values()), gpu)
        for (number, (config, options)), fit in zip(on_gpu.items(), fits, strict=True):
            try:
                check_start(config, options, fit)
            except EngineConfigError as error:
                problems[number] = error
    return problems


def _check_alone(config: ModelConfig, options: EngineOptions, gpu: SimulatedGpu | None) -> bool:
    """Raise what an engine would that has the machine for itself. Returns whether it takes memory of `gpu`."""
    is_on_gpu = options.device == "cuda" or (options.device == "auto" and gpu is not None)
    device_type = "cuda" if is_on_gpu else "cpu"
    check_swap_space(options, device_type)
    if gpu is not None and is_on_gpu:
        check_start(config, options, engine_fit(config, options, gpu))
    else:
        estimate = checked_estimate(config, options, None, device_type=device_type)
        if not is_on_gpu:
            memory = DeviceMemory(device_type="cpu", usable_bytes=main_memory_bytes(), context_bytes=0)
            check_start(config, options, estimate(memory))
    shared_prefixes(options)
    return is_on_gpu and gpu is not None
