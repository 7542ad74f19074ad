"""How much memory an engine will take of its device, predicted before anything is loaded and compared with what it took."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from engine.config.model import ModelConfig, load_model_config
from engine.device import format_name
from engine.errors import EngineConfigError, ModelError
from engine.formats import formats_of, has_fp8
from engine.memory.colocation import alone, estimate_beside
from engine.memory.device import WORKSPACE_BYTES, CapturedGraphs, driver_bytes, release_dropped_engines
from engine.memory.estimate import DeviceMemory, Estimate, check_start, checked_estimate, estimate_fit
from engine.memory.fit import FEW_TOKENS, MemoryFit, format_distinct, gib
from engine.memory.kv_plan import check_fit, short_cache_reason
from engine.memory.main_memory import main_memory_bytes
from engine.memory.shape import Load, MemoryShape
from engine.options import EngineOptions
from engine.protocol import MemoryPart
from engine.step_mode import StepMode
from kernels import ops

TOLERANCE = 0.05
"""How much larger than predicted a part may be, as a share, before the log warns of it."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """`fit`: how the model of this name fits with its options."""

    fit: MemoryFit
    name: str

    @property
    def available_kv_bytes(self) -> int:
        """Bytes for keys and values: as an option or the device decides, else what is predicted to be left."""
        given = self.fit.fixed_kv_bytes
        return self.predicted_kv_bytes if given is None else given

    @property
    def predicted_kv_bytes(self) -> int:
        """Bytes of the whole blocks that have room in the cache."""
        return self.fit.num_blocks * self.fit.needs.block_bytes

    def check(self, options: EngineOptions) -> None:
        """Raise `EngineConfigError`, naming the option, when the model does not fit as requested: before memory is touched,
        because a machine that runs out of memory kills processes instead of refusing."""
        check_fit(self.name, self.fit, options)

    def shortened_note(self, config: ModelConfig, options: EngineOptions) -> str | None:
        """Why the context is shorter than that of the model with this configuration, None when it is not or is as requested."""
        reason = short_cache_reason(config, options, self.fit) if self.fit.fits else f"{self.name} {self.fit.explain()}"
        return None if reason is None else f"the context is {self.fit.context_len} tokens: {reason}"

    def parts(self, measured: MeasuredMemory) -> list[MemoryPart]:
        """Predicted and measured bytes, part by part. What the driver reports in use beside this process cannot be
        distinguished from what other models have, so it is not reported beside them."""
        needs, others_bytes = self.fit.needs, self.fit.others_bytes
        context_bytes = None if others_bytes else measured.context_bytes
        parts = [
            MemoryPart(name="weights", predicted_bytes=needs.weights_bytes, measured_bytes=measured.weights_bytes),
            MemoryPart(name="activations", predicted_bytes=needs.activations_bytes, measured_bytes=measured.activations_bytes),
            MemoryPart(
                name="graphs", predicted_bytes=needs.graphs_bytes, measured_bytes=measured.graphs_bytes,
                num_predicted=needs.num_graphs or None, num_measured=measured.num_graphs,
            ),
            MemoryPart(name="slots", predicted_bytes=needs.slots_bytes, measured_bytes=measured.slots_bytes),
            MemoryPart(name="rotary_tables", predicted_bytes=needs.rotary_bytes, measured_bytes=measured.rotary_bytes),
            MemoryPart(
                name="device_context", predicted_bytes=needs.context_bytes - others_bytes, measured_bytes=context_bytes
            ),
            MemoryPart(name="kv_cache", predicted_bytes=self.predicted_kv_bytes, measured_bytes=measured.kv_bytes),
        ]  # fmt: skip
        return [*parts, MemoryPart(name="other_models", predicted_bytes=others_bytes)] if others_bytes else parts


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """What was allocated in the end; None where this device does not report it, or where nothing has been allocated yet."""

    weights_bytes: int
    kv_bytes: int
    rotary_bytes: int
    activations_bytes: int | None = None
    graphs_bytes: int | None = None
    num_graphs: int | None = None
    slots_bytes: int | None = None
    context_bytes: int | None = None


def forecast_memory(
    name: str,
    config: ModelConfig,
    options: EngineOptions,
    mode: StepMode,
    *,
    dtype: torch.dtype,
    device: torch.device,
    draft: ModelConfig | None = None,
) -> MemoryForecast:
    """Predict from the configuration, those of `colocated_models`, and what the device reports now. Creates the driver's
    context, to count it."""
    ops.operations(device, dtype)  # loads what is compiled for a CPU, and the compiler: a part of what is taken
    memory = _memory(options, device)
    others = list(_estimates_of_others(options.colocated_models, memory)) if device.type == "cuda" else []
    fit = estimate_beside(partial(estimate_fit, config, options, format_name(dtype), mode=mode, draft=draft), others, memory)
    return MemoryForecast(fit, name)


def _estimates_of_others(others: Sequence[Mapping[str, Any]], memory: DeviceMemory) -> Iterator[Estimate]:
    """The estimates of engines that are served from the same GPU. One that refuses its model whatever the others have is left
    nothing: then it does not start, and must not take the others out of service."""
    for values in others:
        with suppress(ModelError, EngineConfigError):
            options = EngineOptions.of(values)
            if options.device != "cpu":
                config = load_model_config(options.model)
                estimate = checked_estimate(config, options, memory.capability)
                check_start(config, options, alone(estimate, memory))
                yield estimate


def check_text_decoder(
    name: str, config: ModelConfig, options: EngineOptions, *, max_len: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise `EngineConfigError` for a decoder whose weights, tables and activations of FEW_TOKENS tokens do not fit: one that
    gives embeddings alone, and so has no cache."""
    ops.operations(device, dtype)
    memory = _memory(options, device)
    fit = MemoryFit(
        model=replace(MemoryShape.of(config), kv_token=0),
        formats=formats_of(config, options, format_name(dtype)),
        load=Load(num_tokens=FEW_TOKENS, num_seqs=1, block_size=options.block_size, on_gpu=device.type == "cuda"),
        usable_bytes=memory.usable_bytes,
        context_bytes=memory.context_bytes,
        wanted_len=max_len,
        has_fp8=has_fp8(memory.capability),
        memory_bytes=memory.memory_bytes,
    )
    if not fit.fits:
        raise EngineConfigError("model", f"{name} does not fit: {fit.explain()}")


def check_weights(name: str, weights_bytes: int, options: EngineOptions, device: torch.device) -> None:
    """Raise `EngineConfigError` where not even the weights of a model fit."""
    memory = _memory(options, device)
    needed_bytes = weights_bytes + memory.context_bytes
    if needed_bytes > memory.usable_bytes:
        needed, usable = format_distinct(needed_bytes, memory.usable_bytes)
        problem = f"needs {needed} (weights {gib(weights_bytes)}, device context {gib(memory.context_bytes)})"
        raise EngineConfigError("model", f"{name} does not fit: {problem}, and {usable} may be used")


def _memory(options: EngineOptions, device: torch.device) -> DeviceMemory:
    """What this process may use of the device, and what is in use already: of a GPU by all processes, of main memory the peak
    of this one alone."""
    if device.type == "cpu":
        used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return DeviceMemory(device_type="cpu", usable_bytes=main_memory_bytes(), context_bytes=used_bytes)
    if torch.cuda.memory_reserved(device):  # this process has had another engine
        release_dropped_engines()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        device_type="cuda",
        usable_bytes=int(total * options.gpu_memory_utilization),
        context_bytes=total - free + WORKSPACE_BYTES,
        capability=torch.cuda.get_device_capability(device),
        memory_bytes=total,
    )


def format_parts(parts: Sequence[MemoryPart]) -> str:
    """The parts in words: `weights 15.0 GiB (predicted 15.1 GiB), graphs 0.1 GiB of 9 (predicted 1.0 GiB of 91), …`."""
    return ", ".join(_format_part(part) for part in parts if part.predicted_bytes or part.measured_bytes)


def _format_part(part: MemoryPart) -> str:
    predicted = f"predicted {gib(part.predicted_bytes)}{_format_count(part.num_predicted)}"
    if part.measured_bytes is None:
        return f"{part.name} {predicted}"
    return f"{part.name} {gib(part.measured_bytes)}{_format_count(part.num_measured)} ({predicted})"


def _format_count(number: int | None) -> str:
    return "" if number is None else f" of {number}"


def underestimated(parts: Sequence[MemoryPart]) -> list[MemoryPart]:
    """The parts that took more than predicted. The device context is left out, as memory of other processes counts in it."""
    return [
        part
        for part in parts
        if part.name != "device_context"
        and part.measured_bytes is not None
        and part.measured_bytes > part.predicted_bytes * (1 + TOLERANCE)
    ]


class _Reading(NamedTuple):
    """Bytes of a GPU: in use by torch's allocator, the most since the reading before, reserved by it, and outside it."""

    allocated: int
    peak: int
    reserved: int
    driver: int


class MemoryMeter:
    """Reads what the parts of an engine take of a GPU while they are made. On CPUs only sizes are known. What this process has
    allocated before, as workspaces that torch keeps of engines that were dropped, counts as context."""

    def __init__(self, device: torch.device) -> None:
        """Call this before anything of the engine is allocated."""
        self._device = device
        self._readings: dict[str, _Reading] = {}
        self._allocated_before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def allocate_workspace(self) -> None:
        """Have torch allocate cuBLAS's workspace for this stream, 32 MiB on Hopper. It is planned with the context, and would
        be measured with the first step, whose first product allocates it. That of the stream of captures is measured with
        graphs."""
        if self._device.type == "cuda":
            torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        self.record("workspace")

    def record(self, part: str) -> None:
        """Record what a part took that was just made: the cache (after the weights), the first steps, slots, graphs."""
        device = self._device
        if device.type == "cuda":
            allocated, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
            self._readings[part] = _Reading(allocated, peak, torch.cuda.memory_reserved(device), driver_bytes(device))
            torch.cuda.reset_peak_memory_stats(device)

    def measured(self, weights_bytes: int, kv_bytes: int, rotary_bytes: int, captured: CapturedGraphs | None) -> MeasuredMemory:
        """What was taken; on a CPU that is the given sizes and nothing else. `captured`: the graphs, and what the driver took
        for them (which other processes on the card may disturb); None without slots."""
        if not self._readings:
            return MeasuredMemory(weights_bytes=weights_bytes, kv_bytes=kv_bytes, rotary_bytes=rotary_bytes)
        cache, workspace, steps = self._readings["cache"], self._readings["workspace"], self._readings["steps"]
        workspace_bytes = workspace.allocated - cache.allocated
        measured = MeasuredMemory(
            weights_bytes=cache.allocated - self._allocated_before - kv_bytes - rotary_bytes,
            kv_bytes=kv_bytes,
            rotary_bytes=rotary_bytes,
            activations_bytes=steps.peak - workspace.allocated,
            context_bytes=steps.driver + self._allocated_before + workspace_bytes,
        )
        if captured is None:
            return measured
        slots, graphs = self._readings["slots"], self._readings["graphs"]
        graphs_bytes = max(0, graphs.reserved - slots.reserved) + captured.driver_bytes
        slots_bytes = slots.allocated - steps.allocated
        return replace(measured, graphs_bytes=graphs_bytes, num_graphs=captured.num_graphs, slots_bytes=slots_bytes)
