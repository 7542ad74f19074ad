"""Memory that a GPU has left for keys and values, and what its driver reports."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from engine.memory.needs import CONTEXT_BYTES, MemoryNeeds

WORKSPACE_BYTES = 128 << 20
"""For libraries and the code of kernels on a GPU, which take their memory in the first step."""


def release_dropped_engines() -> None:
    """Give back the memory of engines that this process has dropped. They are in reference cycles, which Python may collect
    much later, and torch keeps unused memory of a GPU, which the driver, and so the memory plan of another engine, counts as
    taken."""
    gc.collect()
    torch.cuda.empty_cache()


def free_kv_bytes(needs: MemoryNeeds, utilization: float, device: torch.device, *, others_bytes: int = 0) -> int:
    """Bytes that a GPU has left for the KV cache once the weights are loaded, beside what steps need. `utilization`: the share
    of its memory that may be used. `others_bytes`: what is reserved for the engines of other models, taken yet or not."""
    free, total = torch.cuda.mem_get_info(device)
    used_bytes = total - free
    if others_bytes:
        own_bytes = torch.cuda.memory_reserved(device) + CONTEXT_BYTES - WORKSPACE_BYTES
        used_bytes = max(used_bytes, own_bytes + others_bytes)
    reserved = needs.activations_bytes + needs.graphs_bytes + needs.slots_bytes + needs.rotary_bytes + WORKSPACE_BYTES
    return max(0, int(total * utilization) - used_bytes - reserved)


class CapturedGraphs(NamedTuple):
    """Captured graphs, including those evicted since, and the memory that the driver allocated on the card for them outside
    torch's allocator (`driver_bytes`). The driver allocates in large pieces, so that one graph alone shows nothing or too much.
    What it defers until a graph first runs is not included; what other processes allocated on the card during captures is,
    and what they freed is subtracted, down to 0."""

    num_graphs: int = 0
    driver_bytes: int = 0


def driver_bytes(device: torch.device) -> int:
    """Memory of a GPU that is in use outside this process' allocator: by the driver for its context, code of kernels and
    graphs, and by other processes, whose share the driver does not report."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
