"""Filtered distributions equal those of transformers' processors: the same tokens with the same probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from engine.sampling.randomness import key, signed
from kernels.ops import plain_sampling
from tests.support.sampling import distributions, sample, sampling_request

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40, "temperature": 1.7},
    {"top_k": 1030},
    {"top_p": 0.2},
    {"top_p": 0.95, "temperature": 0.7},
    {"min_p": 0.05},
    {"min_p": 0.9, "temperature": 2.0},
    {"typical_p": 0.3},
    {"typical_p": 0.95},
    {"typical_p": 0.5, "temperature": 0.5},
    {"top_k": 20, "typical_p": 0.6},
    {"top_p": 0.9, "typical_p": 0.6},
    {"min_p": 0.02, "typical_p": 0.6},
    {"top_k": 100, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 100, "top_p": 0.8, "min_p": 0.01, "typical_p": 0.7, "temperature": 1.3},
]


def reference(logits: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Probabilities after the processors of transformers, in the order of its `generate`: [B, V] float64"""
    steps: list[Any] = []
    if "temperature" in settings:
        steps.append(transformers.TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        steps.append(transformers.TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        steps.append(transformers.TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        steps.append(transformers.MinPLogitsWarper(settings["min_p"]))
    if "typical_p" in settings:
        steps.append(transformers.TypicalLogitsWarper(settings["typical_p"]))
    scores = logits.double()
    for step in steps:
        scores = step(torch.zeros(len(logits), 1, dtype=torch.int64), scores)
    return torch.softmax(scores, dim=-1)


def logits_of(spread: float, vocab_size: int, rows: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(rows, vocab_size, generator=generator) * spread


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("spread", "vocab_size"), [(4.0, 37), (2.0, 1100), (0.3, 3000)])
def test_filtered_probabilities_equal_those_of_transformers(settings: dict[str, Any], spread: float, vocab_size: int) -> None:
    logits = logits_of(spread, vocab_size)
    result = distributions(logits, [sampling_request(str(i), **settings) for i in range(len(logits))])
    torch.testing.assert_close(result.double(), reference(logits, settings), atol=1e-5, rtol=1e-4)


def test_rows_with_different_filters_are_independent() -> None:
    logits = logits_of(2.0, 1100, rows=len(SETTINGS))
    together = distributions(logits, [sampling_request(str(i), **settings) for i, settings in enumerate(SETTINGS)])
    alone = [distributions(logits[i : i + 1], [sampling_request(**settings)])[0] for i, settings in enumerate(SETTINGS)]
    torch.testing.assert_close(together, torch.stack(alone), atol=0, rtol=0)


def test_a_greedy_row_has_all_probability_at_the_largest_logit() -> None:
    logits = logits_of(2.0, 50)
    result = distributions(logits, [sampling_request(str(i), temperature=0.0, top_k=3) for i in range(len(logits))])
    assert torch.equal(result, torch.nn.functional.one_hot(logits.argmax(-1), 50).float())


def test_sampled_tokens_are_drawn_from_the_filtered_distribution() -> None:
    logits = logits_of(1.0, 1100)
    requests = [sampling_request(str(i), seed=i, logit_bias={3: 4.0}) for i in range(len(logits))]
    tokens = [output.token_id for output in sample(logits, requests)]
    keys = torch.tensor([signed(key(seed, 1)) for seed in range(len(logits))])
    assert plain_sampling.draw_weighted(distributions(logits, requests), keys).tolist() == tokens


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"typical_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_a_row_that_cannot_be_drawn_from_is_all_zeros(settings: dict[str, Any]) -> None:
    logits = logits_of(1.0, 70, rows=3)
    logits[1, 5] = torch.nan
    logits[2] = -torch.inf
    result = distributions(logits, [sampling_request(str(i), **settings) for i in range(3)])
    assert result[0].sum().item() == pytest.approx(1.0, abs=1e-5)
    assert not result[1:].any()
