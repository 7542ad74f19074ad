"""Prompt formats, conversations and parameters of offline calls, and the progress line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.errors import PromptError
from engine.offline.progress import Progress
from engine.offline.prompts import as_list, conversations, params_for, read_prompt
from engine.protocol import InvalidOption, SamplingParams


def encode(text: str) -> list[int]:
    return list(text.encode())


def read(prompt: Any) -> tuple[str | None, list[int]]:
    return read_prompt(prompt, encode)


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("a", 1),
        (["a", "b"], 2),
        ([1, 2], 1),
        ([[1, 2], [3]], 2),
        ((1, 2), 1),
        ({"prompt": "a"}, 1),
        ([], 0),
        ([[]], 1),
        (np.array([1, 2]), 1),
        (torch.tensor([1, 2]), 1),
        (np.array([[1, 2], [3, 4]]), 2),
        ([np.array([1, 2])], 1),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_single_prompt_becomes_a_list_of_one(prompts: Any, count: int) -> None:
    assert len(as_list(prompts)) == count


@pytest.mark.parametrize("prompts", [None, 5, 1.5, b"bytes", object()])
def test_a_value_that_is_not_a_list_of_prompts_is_refused(prompts: Any) -> None:
    with pytest.raises(PromptError, match="prompts must be text"):
        as_list(prompts)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a", [97])),
        ([1, 2], (None, [1, 2])),
        ({"prompt": "a"}, ("a", [97])),
        ({"prompt_token_ids": (1, 2)}, (None, [1, 2])),
        ({"prompt": "x", "prompt_token_ids": [1]}, ("x", [1])),
        ({"prompt": "x", "prompt_token_ids": None}, ("x", [120])),
        (np.array([1, 2]), (None, [1, 2])),
        (torch.tensor([1, 2]), (None, [1, 2])),
    ],
    ids=lambda value: str(value)[:50],
)
def test_text_token_ids_mappings_arrays_and_tensors_are_prompts(prompt: Any, expected: tuple[str | None, list[int]]) -> None:
    assert read(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "must be text or token ids, not NoneType"),
        (5, "must be text or token ids, not int"),
        (b"x", "must be text or token ids, not bytes"),
        ([1.0], "not integers: float"),
        ([True, 1], "not integers: bool"),
        ([1, None], "not integers: NoneType"),
        (["a"], "not integers: str"),
        ([[1]], "not integers: list"),
        (torch.tensor([1.5]), "not integers"),
        (np.array([1.5]), "not integers: float64"),
        ({}, "needs prompt or prompt_token_ids"),
        ({"prompt": None}, "needs prompt or prompt_token_ids"),
        ({"prompt": 5}, "prompt must be text, not int"),
        ({"text": "a", 1: 2}, "unknown fields: 1, text"),
        ({"prompt_token_ids": "12"}, "not integers: str"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_prompt_is_refused_with_the_reason(prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        read(prompt)


def test_text_parts_of_a_message_are_joined_by_line_breaks() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (conversation,) = conversations([{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "content": None}])
    assert conversation == [{"role": "user", "content": "a\nb", "name": "x"}, {"role": "assistant", "content": None}]


@pytest.mark.parametrize(
    "content",
    [[{"type": "image_url", "image_url": {}}], [{"type": "text"}], ["a"], [None], {"text": "a"}, 5],
    ids=str,
)
def test_content_that_is_not_text_is_refused(content: Any) -> None:
    with pytest.raises(PromptError, match="conversation 1: a content must be text"):
        conversations([[], [{"role": "user", "content": content}]])


def test_one_conversation_and_a_list_of_conversations_are_accepted() -> None:
    message = {"role": "user", "content": "a"}
    assert conversations([message]) == [[message]]
    assert conversations([[message], [message]]) == [[message], [message]]
    assert conversations([]) == []


@pytest.mark.parametrize(
    "messages", ["hi", ["hi"], [["hi"]], [5], [None], [{"role": "user"}, "x"], [[{"role": "user"}], "x"]], ids=str
)
def test_an_invalid_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(PromptError, match="must be a list of messages"):
        conversations(messages)


def test_parameters_are_given_once_for_all_prompts_or_one_per_prompt() -> None:
    params = SamplingParams(max_tokens=3)
    assert params_for(None, 2) == [SamplingParams()] * 2
    assert params_for(params, 2) == [params, params]
    assert params_for([params], 1) == [params]
    with pytest.raises(PromptError, match="1 sampling_params were given for 2 prompts"):
        params_for([params], 2)


@pytest.mark.parametrize("params", [{}, {"temperature": 0}, "greedy", [None], [{}], 0], ids=str)
def test_invalid_parameters_are_refused_by_name(params: Any) -> None:
    with pytest.raises(InvalidOption, match="sampling_params must be") as refused:
        params_for(params, 1)
    assert refused.value.param == "sampling_params"


def test_progress_on_a_terminal_is_one_line_with_token_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    now = [100.0]
    monkeypatch.setattr("engine.offline.progress.time.monotonic", lambda: now[0])
    progress = Progress(3, enabled=True)
    progress.show(0)
    now[0] = 102.0
    progress.show(1, tokens_in=4000, tokens_out=500)
    progress.show(2)
    now[0] = 104.0
    progress.end(tokens_in=8000, tokens_out=1000)
    lines = capsys.readouterr().err.split("\r\x1b[K")
    assert lines == [
        "",
        "1 of 3 prompts finished, 2,000 tokens/s in, 250 out",
        "3 of 3 prompts finished, 2,000 tokens/s in, 250 out\n",
    ]


@pytest.mark.parametrize(("is_terminal", "enabled", "total"), [(False, True, 3), (True, False, 3), (True, True, 0)])
def test_progress_prints_nothing_without_terminal_if_disabled_or_without_prompts(
    is_terminal: bool, enabled: bool, total: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal, raising=False)
    progress = Progress(total, enabled=enabled)
    progress.end()
    assert capsys.readouterr().err == ""
