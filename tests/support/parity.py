"""Compares the engine with transformers: every token is its greedy choice, and log-probabilities agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.protocol import TokenEvent

LOGPROB_TOLERANCE = 1e-4  # float32 sums in another order, through a few layers and the log of a softmax


def reference_logprobs(model: Any, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Per answer, transformers' log-probabilities [len(output), V] for prompt and answer.

    One forward pass over all of them, right-padded: no earlier token attends to the padding.
    """
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    longest = max(len(text) for text in texts)
    padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    with torch.inference_mode():
        logits = model(padded, attention_mask=mask).logits.float()
    return [
        logits[i, len(prompt) - 1 : len(prompt) + len(output) - 1].log_softmax(-1)
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def assert_greedy(model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[TokenEvent]]) -> None:
    """Assert that each answer (events with logprobs) is transformers' greedy answer, token for token.

    An answer in which every token is the likeliest after those before it is the greedy one, by induction over its tokens.
    """
    outputs = [[token_id for event in events for token_id in event.token_ids] for events in answers]
    for events, output, expected in zip(answers, outputs, reference_logprobs(model, prompts, outputs), strict=True):
        assert output == expected.argmax(-1).tolist()
        found = torch.tensor([entry.logprob for event in events for entry in event.logprobs or []])
        torch.testing.assert_close(found, expected.amax(-1), rtol=0, atol=LOGPROB_TOLERANCE)
