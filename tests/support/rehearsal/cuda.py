"""Replaces `torch.cuda` during a rehearsal: an H200 or H100 by name, with a gigabyte of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.support.rehearsal.card import SEGMENT_BYTES, Card, Event, Stream
from tests.support.rehearsal.graphs import Graph, capture_graph, on_stream
from tests.support.rehearsal.memory import make_page_locked
from tests.support.rehearsal.tensors import DEVICE

CAPABILITY = (9, 0)
MULTIPROCESSORS = 4
"""As few as under the interpreter, so that kernels with a fixed grid stay cheap."""


class HostGenerator(torch.Generator):
    """A CPU generator in place of one on the card."""

    def __new__(cls, device: object = None) -> HostGenerator:
        return super().__new__(cls)


def cuda_replacements(card: Card) -> dict[str, Any]:
    """Replacements by their name in `torch.cuda`."""
    properties = SimpleNamespace(
        name=card.kind.name, major=9, minor=0, multi_processor_count=MULTIPROCESSORS, total_memory=card.total_bytes,
        L2_cache_size=card.kind.l2_bytes, shared_memory_per_block_optin=227 << 10, warp_size=32,
    )  # fmt: skip

    def mem_get_info(*_: object) -> tuple[int, int]:
        card.check_alive()
        return card.total_bytes - card.used_bytes, card.total_bytes

    def reset_peak(*_: object) -> None:
        card.peak_bytes = card.allocated_bytes

    def empty_cache() -> None:
        card.refuse_in_capture("to give memory back")
        card.reserved_bytes = -(-card.allocated_bytes // SEGMENT_BYTES) * SEGMENT_BYTES
        card.pool_uses = {pool: uses for pool, uses in card.pool_uses.items() if uses}

    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "device": lambda *_: nullcontext(),
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda *_: card.allocated_bytes,
        "max_memory_allocated": lambda *_: card.peak_bytes,
        "memory_reserved": lambda *_: card.reserved_bytes,
        "reset_peak_memory_stats": reset_peak,
        "current_blas_handle": card.allocate_blas_workspace,
        "empty_cache": empty_cache,
        "synchronize": lambda *_: card.wait_for_all("torch.cuda.synchronize"),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "current_stream": lambda *_: card.stream,
        "default_stream": lambda *_: card.streams[0],
        "stream": on_stream,
        "graph": capture_graph,
        "graph_pool_handle": card.make_pool,
        "is_current_stream_capturing": lambda: card.capture is not None,
    }


@contextmanager
def replace_torch_cuda(card: Card) -> Iterator[None]:
    """Let torch use the card, also for tensors made from Python numbers."""

    def current_stream(*_: object) -> Stream:
        return card.stream

    with ExitStack() as stack:
        for name, stand_in in cuda_replacements(card).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(mock.patch.object(torch.accelerator, "current_stream", current_stream))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(mock.patch.object(torch, name, _from_python_numbers(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch, "Generator", HostGenerator))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", _with_device_index(torch.Tensor.to)))
        yield


def _from_python_numbers(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch creates these tensors in main memory, page-locked if requested, and copies them to the device. It cannot pin those
    made from an array (`internal_new_from_data` in torch/csrc/utils/tensor_new.cpp)."""

    def made(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, is_locked = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if is_locked and isinstance(data, np.ndarray):
            raise RuntimeError("Can't pin tensor constructed from numpy")
        found = make(data, *args, **kwargs)
        if is_locked:
            found = make_page_locked(found)
        return found if device is None else found.to(DEVICE if torch.device(device).type == "cuda" else device)

    return made


def _with_device_index(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Resolve `cuda` to the first card, for which torch would ask its CUDA library."""

    def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return to(tensor, *(_first(each) for each in args), **{name: _first(each) for name, each in kwargs.items()})

    return moved


def _first(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and torch.device(value).type == "cuda"
    return DEVICE if is_cuda else value
