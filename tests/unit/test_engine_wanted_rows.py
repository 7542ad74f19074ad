"""After its attention the last layer computes only the requested rows, with the same results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.runner.paged_decoder import PagedDecoder
from engine.runner.token_spans import TokenSpan
from tests.support.engines import small_engine
from tests.support.tiny_models import saved_model

FAMILIES = ("llama", "gemma2", "qwen3_moe", "granite")
BLOCK_SIZE = 16
LENGTHS = (1, 9, 1, 40)
"""Tokens per span: decodes and chunks."""


@pytest.fixture(params=FAMILIES)
def decoder(request: pytest.FixtureRequest) -> PagedDecoder:
    directory = saved_model(request.param).directory
    engine = small_engine(directory, num_kv_blocks=16, kv_cache_bytes=None, block_size=BLOCK_SIZE)
    return engine.runner.target  # type: ignore[attr-defined,no-any-return]


def token_spans(outputs: Sequence[Sequence[int]]) -> list[TokenSpan]:
    """Spans of LENGTHS tokens, with `outputs` as the requested rows of each."""
    made, block = [], 0
    for length, wanted in zip(LENGTHS, outputs, strict=True):
        blocks = -(-length // BLOCK_SIZE)
        made.append(TokenSpan([(7 * block + i) % 50 for i in range(length)], 0, range(block, block + blocks), wanted))
        block += blocks
    return made


def forward(decoder: PagedDecoder, outputs: Sequence[Sequence[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Hidden states of the requested rows, and the content of the caches after the pass."""
    for cache in decoder.kv_caches:
        cache.zero_()
    with torch.inference_mode():
        hidden = decoder.forward(decoder.prepare(token_spans(outputs)))
    return hidden, [cache.clone() for cache in decoder.kv_caches]


EVERYTHING = [range(length) for length in LENGTHS]


@pytest.mark.parametrize("outputs", [[(0,), (8,), (0,), (39,)], [(0,), (), (), (39, 3)], [(), (), (), (5,)], [()] * 4], ids=str)
def test_hidden_states_and_caches_equal_those_of_a_pass_for_all_rows(
    decoder: PagedDecoder, outputs: list[tuple[int, ...]]
) -> None:
    hidden, caches = forward(decoder, outputs)
    everything, all_caches = forward(decoder, EVERYTHING)
    firsts = [sum(LENGTHS[:row]) for row in range(len(LENGTHS))]
    requested = [first + output for first, of_row in zip(firsts, outputs, strict=True) for output in of_row]
    assert torch.equal(hidden, everything[requested])
    assert all(torch.equal(cache, whole) for cache, whole in zip(caches, all_caches, strict=True))


def test_the_last_layer_computes_only_requested_rows_after_its_attention(
    decoder: PagedDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_rows: list[int] = []
    layers = decoder._decoder._layers
    for layer in layers:
        mlp = layer._mlp

        def recording_mlp(x: torch.Tensor, *others: Any, mlp: Any = mlp) -> torch.Tensor:
            num_rows.append(len(x))
            result: torch.Tensor = mlp(x, *others)
            return result

        monkeypatch.setattr(layer, "_mlp", recording_mlp)
    forward(decoder, [(0,), (), (0,), (39,)])
    assert num_rows == [sum(LENGTHS)] * (len(layers) - 1) + [3]
