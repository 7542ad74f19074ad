"""How long an answer is expected to be, from recent ones of the same key and model. Changes no request, only what is held."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

EXPECTED_OUTPUT_TOKENS = 256
"""Output expected of a key of which fewer than OUTPUTS_MIN requests with this model are known, and the least that is expected
of any: a key cannot make itself cheap by a row of short answers before a burst of long ones."""
OUTPUTS_MIN = 20
OUTPUTS_KEPT = 100


def expected_output(outputs: Sequence[int] | deque[int], max_output_tokens: int | None, room: float) -> int:
    """Return the output to reserve for one answer: what nine in ten of the key's recent ones stayed within, never above the
    asked maximum.

    When nothing was asked for, a guess never makes a request larger than a limit: it is cut to the `room` that the limits leave
    beside the prompt.
    """
    guess = max(percentile_90(outputs), EXPECTED_OUTPUT_TOKENS) if len(outputs) >= OUTPUTS_MIN else EXPECTED_OUTPUT_TOKENS
    if max_output_tokens is not None:
        return min(max_output_tokens, guess)
    return int(max(0, min(guess, room)))


def percentile_90(values: Sequence[int] | deque[int]) -> int:
    """Return the smallest value that nine in ten of `values` do not pass."""
    ordered = sorted(values)
    return ordered[-(-9 * len(ordered) // 10) - 1]
