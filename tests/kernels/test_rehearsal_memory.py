"""Memory on an emulated GPU: engines created one after another, two engines at once, and writes to inference tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine import LLM
from engine.build import build_engine
from engine.memory.forecast import MemoryMeter
from engine.memory.needs import CONTEXT_BYTES
from engine.options import EngineOptions
from tests.support.engines import PASS_S
from tests.support.rehearsal import DEVICE, rehearsal
from tests.support.rehearsal import card as rehearsed_card
from tests.support.rehearsal.card import Card
from tests.support.rehearsal.table import replace_triton_operations
from tests.support.tiny_models import saved_model

SMALL: dict[str, Any] = {
    "device": "cuda", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64,
}  # fmt: skip
CARD_BYTES = 512 << 20
KEPT_SHARE = 0.95
"""Of an engine's blocks, how many the next one has at least: torch keeps a workspace of cuBLAS for each stream."""


def _fastest_s(*_: object) -> float:
    """Not a mock, which would keep the decoders that it was called with."""
    return PASS_S


@pytest.fixture
def card() -> Iterator[Card]:
    timed = mock.patch("engine.runner.calibration._fastest_s", _fastest_s)
    with rehearsal(total_bytes=CARD_BYTES) as card, replace_triton_operations(), timed:
        yield card


def test_a_closed_llm_frees_its_memory_for_the_next_one(card: Card, llama: Path) -> None:
    """As when the perplexities of a model are compared with and without quantisation."""
    num_blocks, taken = [], []
    for _ in range(3):
        with LLM(llama, **SMALL) as llm:
            num_blocks.append(llm.status().kv_blocks_total)
            taken.append(card.used_bytes)
    assert min(num_blocks) > KEPT_SHARE * max(num_blocks)
    assert min(taken) > CARD_BYTES // 2
    assert card.used_bytes < CARD_BYTES // 4, "nobody has an engine, and the memory is the driver's again"


def test_a_dropped_engine_frees_its_memory_for_the_next_one(card: Card, llama: Path) -> None:
    num_blocks = [build_engine(EngineOptions(model=llama, **SMALL)).info.num_kv_blocks for _ in range(2)]
    assert min(num_blocks) > KEPT_SHARE * max(num_blocks)


@pytest.mark.parametrize(
    "own", [{}, {"block_size": 32}, {"enforce_eager": True, "max_num_seqs": 2}, {"kv_cache_bytes": 100 << 20}], ids=str
)
def test_engines_of_two_models_fit_one_gpu(own: dict[str, Any], card: Card, llama: Path) -> None:
    """As in two processes: the allocator of the second engine does not count memory of the first as its own."""
    other = saved_model("qwen3", num_hidden_layers=2, head_dim=16).directory
    card.total_bytes = 2 << 30  # room for the context that each process is assumed to have
    engines = []
    told = [{"model": str(llama), **SMALL}, {"model": str(other), **SMALL, **own}]
    for options, beside in (told, reversed(told)):
        reserved_by_others = card.reserved_bytes
        with mock.patch("torch.cuda.memory_reserved", lambda *_, others=reserved_by_others: card.reserved_bytes - others):
            engines.append(build_engine(EngineOptions.of({**options, "colocated_models": [beside]})))
    tokens = [engine.info.num_kv_blocks * engine.info.block_size for engine in engines]
    if "kv_cache_bytes" not in own:
        assert min(tokens) > 0.9 * max(tokens), "the same number of tokens"
    assert card.used_bytes + 2 * CONTEXT_BYTES <= card.total_bytes
    caches_bytes = [part.measured_bytes for engine in engines for part in engine.info.memory if part.name == "kv_cache"]
    assert sum(filter(None, caches_bytes)) > 0.25 * card.total_bytes


def test_workspaces_of_the_matrix_library_count_as_context_and_not_as_weights_or_activations() -> None:
    """Those of earlier engines too."""
    measured = []
    with rehearsal():
        for _ in range(2):
            meter = MemoryMeter(DEVICE)
            with torch.cuda.stream(torch.cuda.Stream(DEVICE)):  # type: ignore[no-untyped-call]
                weights = torch.ones(64, 64, device=DEVICE)
                meter.record("cache")
                meter.allocate_workspace()
                weights @ weights
                meter.record("steps")
                measured.append(meter.measured(weights.nbytes, 0, 0, None))
            del weights
    assert {each.weights_bytes for each in measured} == {each.activations_bytes for each in measured} == {64 * 64 * 4}
    context_bytes, workspace_bytes = rehearsed_card.CONTEXT_BYTES, rehearsed_card.BLAS_WORKSPACE_BYTES
    assert [each.context_bytes for each in measured] == [context_bytes + workspace_bytes, context_bytes + 2 * workspace_bytes]


def test_writing_to_an_inference_tensor_outside_inference_mode_is_refused() -> None:
    with rehearsal():
        usual = torch.zeros(3, device=DEVICE)
        with torch.inference_mode():
            made = torch.zeros(3, device=DEVICE)
            view = usual[:2]
            for each in (made, view, made[1:]):
                each.add_(1.0)
        view.fill_(2.0)
        index, one = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.ones(1, device=DEVICE)
        writes: list[Callable[[], object]] = [
            lambda: made.add_(1.0), made[:2].zero_, lambda: made.copy_(usual), lambda: made.index_copy_(0, index, one),
        ]  # fmt: skip
        for write in writes:
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
                write()
        assert usual.tolist() == [2.0, 2.0, 0.0]
        assert made.tolist() == [1.0, 2.0, 2.0]
