"""How much memory an engine will take of its device, predicted before anything is loaded and compared with what it took."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from engine.config.model import ModelConfig, load_model_config
from engine.device import format_name
from engine.errors import EngineConfigError, ModelError
from engine.formats import check_formats, computed_dtype, formats_of, has_fp8
from engine.memory.colocation import Estimate, alone, estimate_beside
from engine.memory.device import (
    WORKSPACE_BYTES,
    CapturedGraphs,
    driver_bytes,
    main_memory_bytes,
    release_dropped_engines,
)
from engine.memory.estimate import DeviceMemory, estimate_fit
from engine.memory.fit import FEW_TOKENS, MemoryFit, format_distinct, gib
from engine.memory.kv_plan import check_context
from engine.memory.shape import Load, MemoryShape
from engine.options import CPU_KV_CACHE_BYTES, EngineOptions
from engine.protocol import MemoryPart
from engine.speculation.options import check_draft_vocabulary
from engine.step_mode import StepMode
from kernels import ops

TOLERANCE = 0.05
"""How much larger than predicted a part may be, as a share, before the log warns of it."""


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """`fit`: how the model fits with its options. `fixed_kv_bytes`: the size of the cache where an option or the device decides
    it, None where the cache gets what is left."""

    fit: MemoryFit
    fixed_kv_bytes: int | None
    name: str

    @property
    def available_kv_bytes(self) -> int:
        """Bytes for keys and values: as an option or the device decides, else what is predicted to be left."""
        return self.predicted_kv_bytes if self.fixed_kv_bytes is None else self.fixed_kv_bytes

    @property
    def predicted_kv_bytes(self) -> int:
        """Bytes of the whole blocks that have room in the cache."""
        needs = self.fit.needs
        if self.fixed_kv_bytes is not None:
            return self.fixed_kv_bytes // needs.block_bytes * needs.block_bytes
        return needs.num_blocks(self.fit.usable_bytes) * needs.block_bytes

    def check(self, options: EngineOptions) -> None:
        """Raise `EngineConfigError`, naming the option, when the model does not fit as requested: before memory is touched,
        because a machine that runs out of memory kills processes instead of refusing. Operators set `num_kv_blocks` as
        `num_gpu_blocks_override`."""
        fit, needs = self.fit, self.fit.needs
        if self.fixed_kv_bytes is None:
            if not fit.context_len:
                raise EngineConfigError("model", f"{self.name} does not fit: {fit.explain()}")
            if options.max_model_len is not None and not fit.fits:
                raise EngineConfigError("max_model_len", f"({options.max_model_len}) does not fit: {self.name} {fit.explain()}")
            return
        most = needs.num_blocks(fit.usable_bytes)
        room_bytes = most * needs.block_bytes
        if most and self.predicted_kv_bytes > room_bytes:
            room = f"beside {self.name} there is room for {room_bytes} bytes ({gib(room_bytes)})"
            if options.num_kv_blocks is not None:
                problem = f"({options.num_kv_blocks} blocks, {gib(self.fixed_kv_bytes)}) is too much: {room}, {most} blocks"
                raise EngineConfigError("num_gpu_blocks_override", problem)
            if options.kv_cache_bytes is not None:
                problem = f"({self.fixed_kv_bytes} bytes, {gib(self.fixed_kv_bytes)}) is too much: {room}"
                raise EngineConfigError("kv_cache_bytes", problem)
        if needs.fixed_bytes + self.fixed_kv_bytes > fit.usable_bytes:
            misfit = f"{self.name} does not fit with {gib(self.fixed_kv_bytes)} of keys and values"
            raise EngineConfigError("model", f"{misfit}: {fit.explain()}")

    def shortened_note(self) -> str | None:
        """Why the context is shorter than the model's own, None when it is not."""
        if self.fixed_kv_bytes is not None or self.fit.fits:
            return None
        return f"the context is {self.fit.context_len} tokens: {self.name} {self.fit.explain()}"

    def parts(self, measured: MeasuredMemory) -> list[MemoryPart]:
        """Predicted and measured bytes, part by part. What the driver reports in use beside this process cannot be told apart
        from what other models have, so it is not reported beside them."""
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
    context, to count it. A model that its own engine refuses whatever the others have is left nothing."""
    ops.operations(device, dtype)  # loads what is compiled for a CPU, and the compiler: a part of what is taken

    def estimate(config: ModelConfig, dtype: str, memory: DeviceMemory) -> MemoryFit:
        return estimate_fit(config, options, dtype, memory, mode, draft=draft)

    memory, others = _memory(options, device), list[Estimate]()
    if device.type == "cuda" and options.kv_cache_bytes is None and options.num_kv_blocks is None:
        others = [partial(estimate, *other) for other in _other_models(options, memory.capability, draft)]
        others = [other for other in others if _is_enough(alone(other, memory), options)]
    fit = estimate_beside(partial(estimate, config, format_name(dtype)), others, memory)
    kv_bytes = _fixed_kv_bytes(options, device, fit.needs.block_bytes)
    if kv_bytes is not None:
        fit = replace(fit, wanted_len=min(fit.wanted_len, kv_bytes // fit.needs.block_bytes * options.block_size))
    return MemoryForecast(fit, kv_bytes, name)


def _other_models(
    options: EngineOptions, capability: tuple[int, int] | None, draft: ModelConfig | None
) -> Iterator[tuple[ModelConfig, str]]:
    """Configurations of the models that are served from the same GPU, and what they are computed in. Those that cannot be read
    or contradict the options are left out."""
    for folder in options.colocated_models:
        with suppress(ModelError, EngineConfigError):
            config = load_model_config(folder)
            check_context(config, options)
            dtype = computed_dtype(options.dtype, config.torch_dtype, "cuda")
            check_formats(config, options, dtype, capability)
            if draft is not None:
                check_draft_vocabulary(draft, config)
            yield config, dtype


def _is_enough(fit: MemoryFit, options: EngineOptions) -> bool:
    """Whether the context that fits is not refused: a shorter one than the model's own is, if it was asked for."""
    return fit.context_len > 0 if options.max_model_len is None else fit.fits


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


def _fixed_kv_bytes(options: EngineOptions, device: torch.device, block_bytes: int) -> int | None:
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks * block_bytes
    return options.kv_cache_bytes or (CPU_KV_CACHE_BYTES if device.type == "cpu" else None)


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
    """Reads what the parts of an engine take of a GPU while they are made. On CPUs only sizes are known."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._readings: dict[str, _Reading] = {}

    def record(self, part: str) -> None:
        """Read what is taken when a part is made: the cache (behind the weights), the first steps, slots, graphs."""
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
        cache, steps = self._readings["cache"], self._readings["steps"]
        measured = MeasuredMemory(
            weights_bytes=cache.allocated - kv_bytes - rotary_bytes,
            kv_bytes=kv_bytes,
            rotary_bytes=rotary_bytes,
            activations_bytes=steps.peak - cache.allocated,
            context_bytes=steps.driver,
        )
        if captured is None:
            return measured
        slots, graphs = self._readings["slots"], self._readings["graphs"]
        graphs_bytes = max(0, graphs.reserved - slots.reserved) + captured.driver_bytes
        slots_bytes = slots.allocated - steps.allocated
        return replace(measured, graphs_bytes=graphs_bytes, num_graphs=captured.num_graphs, slots_bytes=slots_bytes)
