"""How the engines of several models divide the memory of one GPU. Knows no torch.

Engines start at the same time and do not communicate. Each predicts what all of them need, from their configurations, and
leaves the others their part. So the division is the same in whatever order they start, and when one is restarted later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.memory.estimate import DeviceMemory, Estimate
from engine.memory.fit import MemoryFit, divide_memory
from engine.memory.needs import CONTEXT_BYTES


def alone(model: Estimate, memory: DeviceMemory) -> MemoryFit:
    """How `model` fits into the memory of a GPU that its engine has for itself."""
    return model(_empty(memory))


def _empty(memory: DeviceMemory) -> DeviceMemory:
    return replace(memory, context_bytes=CONTEXT_BYTES)


def estimate_beside(model: Estimate, others: Sequence[Estimate], memory: DeviceMemory) -> MemoryFit:
    """How `model` fits into the memory of a GPU if the engines of `others` have their part of it, taken yet or not.

    The parts follow from a second look: with less than all of the GPU, a model may have fewer seats or a shorter context, and
    need less."""
    if not others:
        return model(memory)
    empty, estimates = _empty(memory), [model, *others]
    parts = divide_memory(memory.usable_bytes, [estimate(empty) for estimate in estimates])
    fits = [estimate(replace(empty, others_bytes=sum(parts) - part)) for estimate, part in zip(estimates, parts, strict=True)]
    others_bytes = sum(divide_memory(memory.usable_bytes, fits)[1:])
    return model(replace(memory, others=tuple(fits[1:]), others_bytes=others_bytes))
