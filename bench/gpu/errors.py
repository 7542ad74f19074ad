"""A kernel's error against the exact result, relative to torch's error in the same dtype; and whether bits are equal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from bench.gpu.context import Context
from bench.gpu.rows import Row
from bench.gpu.targets import equality_row, error_row, invariance_row

T = TypeVar("T")
R = TypeVar("R")
Outputs = torch.Tensor | Sequence[torch.Tensor]
ResultPair = tuple[Outputs, Outputs]
"""(ours, expected), which must be equal"""
ResultTriple = tuple[Outputs, Outputs, Outputs]
"""(ours, exact, torch's)"""
Cases = Sequence[tuple[str, Callable[[], T]]]
"""(name, function that computes the results) of each case"""
FLOOR_UNITS = 0.25
"""Floor of torch's error, in rounding units of the largest result: a smaller one is a matter of chance (a copy has none)."""


def check_errors(context: Context, name: str, cases: Cases[ResultTriple]) -> None:
    """Emit a row with the error of the worst case; its facts list all cases."""

    def measure() -> None:
        found = _evaluate_cases(cases, lambda results: _error(*results))
        worst = max(found, key=lambda label: found[label]["ratio"])
        samples = [each["ratio"] for each in found.values()]
        row = Row(name=error_row(name), value=found[worst]["ratio"], samples=samples, facts={"cases": found})
        row.note = f"worst: {worst}, error {found[worst]['ours']:.3g}, torch's {found[worst]['torch']:.3g}"
        context.emit(row)

    context.guard(error_row(name), measure)


def _evaluate_cases(cases: Cases[T], measure: Callable[[T], R]) -> dict[str, R]:
    """Apply `measure` to each case; results by name. An error names its case. Raises AssertionError for duplicate names:
    one would hide the other."""
    found: dict[str, R] = {}
    for label, make in cases:
        assert label not in found, f"two cases are named {label}"
        try:
            found[label] = measure(make())
        except Exception as error:
            error.add_note(f"in the case {label}, number {len(found) + 1} of {len(cases)}")
            raise
    return found


def _error(ours: Outputs, exact: Outputs, theirs: Outputs) -> dict[str, float]:
    """Our error and torch's, for the output with the worst ratio of the two; infinite if any of the three is not finite."""
    found = []
    for mine, true, other in zip(_as_list(ours), _as_list(exact), _as_list(theirs), strict=True):
        true = true.double()
        assert mine.shape == true.shape, f"shape {tuple(mine.shape)}, expected {tuple(true.shape)}"
        error, base = ((each.double() - true).abs().max().item() for each in (mine, other))
        floor = FLOOR_UNITS * torch.finfo(mine.dtype).eps * true.abs().max().item()
        ratio = error / max(base, floor, 1e-30)
        if not math.isfinite(error + base):  # NaN would not compare as worse than anything
            ratio = error = float("inf")
        found.append({"ratio": ratio, "ours": error, "torch": base, "largest": true.abs().max().item()})
    return max(found, key=lambda each: each["ratio"])


def check_equal(context: Context, name: str, cases: Cases[ResultPair]) -> None:
    """Emit a row that counts the elements that differ from the reference."""
    _count(context, equality_row(name), cases)


def check_invariant(context: Context, name: str, cases: Cases[ResultPair]) -> None:
    """Emit a row that counts the bytes that differ between a row computed alone and the same row in a batch."""
    _count(context, invariance_row(name), cases)


def _count(context: Context, name: str, cases: Cases[ResultPair]) -> None:
    def measure() -> None:
        found = _evaluate_cases(cases, lambda results: _differences(*results))
        note = ", ".join(f"{label}: {count}" for label, count in found.items() if count)
        context.emit(Row(name=name, value=float(sum(found.values())), note=note, facts={"cases": found}))

    context.guard(name, measure)


def _differences(ours: Outputs, expected: Outputs) -> int:
    total = 0
    for mine, wanted in zip(_as_list(ours), _as_list(expected), strict=True):
        assert mine.shape == wanted.shape, f"shape {tuple(mine.shape)}, expected {tuple(wanted.shape)}"
        assert mine.dtype == wanted.dtype, f"{mine.dtype}, expected {wanted.dtype}"
        left, right = (each.contiguous().view(-1).view(torch.uint8).view(mine.numel(), -1) for each in (mine, wanted))
        total += int((left != right).any(dim=1).sum()) if mine.numel() else 0
    return total


def _as_list(outputs: Outputs) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
