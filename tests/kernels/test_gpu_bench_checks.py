"""Checks of the GPU benchmark: error bounds independent of random numbers, bytes that kernels move, and names of cases."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch

from bench.gpu import check_sampling, processes, speed_rows
from bench.gpu.context import Context
from bench.gpu.errors import ResultTriple, check_equal, check_errors
from bench.gpu.plan import PARTS, Part
from bench.gpu.targets import ERROR_RATIO_MAX, error_row

LOG2_UNIT = 2.0**-22
"""By so much of its result at most a card's logarithm is wrong, beyond numbers near one (PTX ISA, lg2.approx)."""


def roughly(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
    """`token_logprobs` in its order, each logarithm as wrong as it may be, up or down by the row."""
    largest = logits.amax(1)
    total = (logits - largest[:, None]).double().exp().sum(1).float()
    wrong = 1 + LOG2_UNIT * (1 - 2 * (torch.arange(len(logits)) % 2))
    whole = largest + (total.double().log2() * wrong).float() * torch.tensor(2.0).log()
    return logits.gather(1, ids) - whole[:, None], None


def exactly(logits: torch.Tensor, dim: int) -> torch.Tensor:
    """`log_softmax` in the order of torch's kernel for GPUs, with an exact sum; that for CPUs is wrong by more."""
    below = logits - logits.amax(dim, keepdim=True)
    return below - below.double().exp().sum(dim, keepdim=True).log().to(logits.dtype)


def test_correct_log_probabilities_pass_for_any_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_sampling, "triton_and_reference", lambda *_: (roughly, None))
    monkeypatch.setattr(torch.Tensor, "log_softmax", exactly)
    ratios = []
    for seed in range(8):
        torch.manual_seed(seed)
        told: list[dict[str, Any]] = []
        context = Context(torch.device("cpu"), False, {}, told.append, 0.0)
        check_errors(context, "log-probabilities", [("rows", partial(check_sampling._logprobs, context))])
        assert told[0]["row"]["name"] == error_row("log-probabilities")
        ratios.append(told[0]["row"]["value"])
    assert max(ratios) < ERROR_RATIO_MAX, ratios


def test_half_of_the_rotary_table_is_counted_as_read() -> None:
    context = Context(torch.device("cpu"), True, {}, lambda _: None, 0.0)
    _, num_bytes = speed_rows._rope(context)
    tokens, heads, kv_heads, head = 6, 4, 2, 32 * 2
    read, turned, cached = heads + 2 * kv_heads, heads + kv_heads, 2 * kv_heads
    assert num_bytes == tokens * head * (read + turned + cached + 1)


def test_exact_references_use_float32_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE"):
        monkeypatch.setenv(name, "1")
        assert name not in processes._environment(rehearse=False)


@pytest.mark.parametrize("spoilt", range(3))
def test_values_that_are_not_finite_exceed_every_allowed_error(spoilt: int) -> None:
    def case(value: float) -> ResultTriple:
        ours, exact, theirs = (torch.tensor([1.0, value if index == spoilt else 1.0]) for index in range(3))
        return ours, exact, theirs

    told: list[dict[str, Any]] = []
    context = Context(torch.device("cpu"), False, {}, told.append, 0.0)
    check_errors(context, "rms norm", [("finite", partial(case, 1.0)), ("spoilt", partial(case, math.nan))])
    assert told[0]["row"]["value"] == math.inf
    assert told[0]["row"]["note"].startswith("worst: spoilt")


def test_an_error_names_the_case_that_raised_it() -> None:
    def fails() -> ResultTriple:
        raise RuntimeError("an illegal memory access")

    one, told = torch.ones(1), list[dict[str, Any]]()
    context = Context(torch.device("cpu"), False, {}, told.append, 0.0)
    check_errors(context, "rms norm", [("1 row", lambda: (one, one, one)), ("9 rows", fails)])
    assert "in the case 9 rows, number 2 of 2" in told[0]["row"]["note"]


@pytest.mark.parametrize("check", [check_errors, check_equal])
def test_two_cases_of_one_name_are_refused(check: Callable[..., None]) -> None:
    one, zero, told = torch.ones(1), torch.zeros(1), list[dict[str, Any]]()
    results = (one, zero, zero), (one, one, one)
    wrong_and_right = [("row", partial(tuple, each[: 2 if check is check_equal else 3])) for each in results]
    check(Context(torch.device("cpu"), False, {}, told.append, 0.0), "rms norm", wrong_and_right)
    assert told[0]["row"]["error"] == "AssertionError: two cases are named row"


@pytest.mark.parametrize("rehearsal", [False, True])
@pytest.mark.parametrize("part", [each for each in PARTS if each.module.startswith("bench.gpu.check_")], ids=attrgetter("name"))
def test_all_cases_of_a_check_have_unique_names(part: Part, rehearsal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    labels: list[list[str]] = []
    module = importlib.import_module(part.module)
    for name in ("check_errors", "check_equal", "check_invariant"):
        monkeypatch.setattr(module, name, lambda *given: labels.append([label for label, _ in given[2]]), raising=False)
    getattr(module, part.function)(Context(torch.device("cpu"), rehearsal, {}, lambda _: None, 0.0))
    assert labels
    assert all(len(each) == len(set(each)) for each in labels), labels
