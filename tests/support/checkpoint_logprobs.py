"""Log-probabilities of quantised checkpoints, by the engine and by transformers with the dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine import LLM, SamplingParams
from tests.support import quantised_checkpoints as layouts
from tests.support.engines import generation_request, run_to_end, small_engine
from tests.support.parity import LOGPROB_TOLERANCE, reference_logprobs
from tests.support.tiny_models import VOCAB_SIZE, saved_model

LLM_OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_bytes": 1_000_000}
ROUNDED_TOLERANCE, ROUNDED_MEAN_TOLERANCE = 0.3, 0.02
"""Neighbours in E4M3 are up to an eighth apart. One of 64 inputs rounded to the other neighbour moves a logprob by at most a
tenth; few are, so the mean is close. A scale that is not applied moves the mean by one or more."""

PROMPTS = [
    [(7 * i * i + 3 * i + seed) % (VOCAB_SIZE - 3) + 3 for i in range(length)] for seed, length in ((1, 40), (2, 17), (3, 2))
]

FAMILIES: dict[str, dict[str, Any]] = {
    "llama-biased": {},
    "qwen2": {},
    "gemma2": {},  # tied head
    "phi3": {},  # fused in the checkpoint
    "qwen3_moe": {"moe_intermediate_size": 32},
}


def prompt_logprobs(directory: Path, **options: Any) -> list[torch.Tensor]:
    """The log-probability of each prompt token after the first, by the engine."""
    engine = small_engine(directory, **options)
    try:
        requests = [generation_request(str(i), prompt, max_tokens=1, prompt_logprobs=0) for i, prompt in enumerate(PROMPTS)]
        events = run_to_end(engine, requests)
        found = [
            [entry.logprob for event in events[str(i)] for entry in event.prompt_logprobs or []] for i in range(len(PROMPTS))
        ]
        return [torch.tensor(logprobs) for logprobs in found]
    finally:
        engine.close()


def expected_logprobs(model: Any) -> list[torch.Tensor]:
    """The same as `prompt_logprobs`, by a model of transformers."""
    rows = reference_logprobs(model, [prompt[:1] for prompt in PROMPTS], [prompt[1:] for prompt in PROMPTS])
    return [row.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0] for row, prompt in zip(rows, PROMPTS, strict=True)]


def assert_logprobs_equal(found: list[torch.Tensor], expected: list[torch.Tensor], layout: layouts.Layout) -> None:
    """Compare log-probabilities, with a wider tolerance if the layout rounds the inputs of products."""
    ours, theirs = torch.cat(found), torch.cat(expected)
    rounded = layout.rounds_input is not None
    torch.testing.assert_close(ours, theirs, rtol=0, atol=ROUNDED_TOLERANCE if rounded else LOGPROB_TOLERANCE)
    assert not rounded or float((ours - theirs).abs().mean()) < ROUNDED_MEAN_TOLERANCE


def unquantised(family: str) -> Path:
    """The directory of a model to be quantised, `llama` or one of FAMILIES."""
    return saved_model(family, **{**layouts.SIZES, "head_dim": 16, **FAMILIES.get(family, {})}).directory


def llm_logprobs(directory: Path, **options: Any) -> torch.Tensor:
    """The log-probability of each token after the first of a prompt of 40 tokens, by `LLM` with `options`."""
    prompt = [(11 * i * i + i) % 120 + 3 for i in range(40)]
    with LLM(directory, **LLM_OPTIONS, **options) as llm:
        output = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    entries = (output.prompt_logprobs or [])[1:]
    return torch.tensor([next(iter(entry.values())).logprob for entry in entries if entry is not None])
