"""The progress of a step, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from steps import progress
from steps.progress import Step


class Times:
    """A clock that the test sets, in place of `time`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    times = Times()
    monkeypatch.setattr(progress, "time", times)
    return times


def test_without_a_terminal_a_long_step_says_how_far_it_is_every_15_seconds(times: Times) -> None:
    log = io.StringIO()
    with Step("Installing 77 packages", log) as step:
        for number in range(1, 33):
            times.now_s += 1.0
            step.detail(f"fetching {number} of 77")
    assert log.getvalue().splitlines() == [
        "Installing 77 packages ...",
        "Installing 77 packages: fetching 15 of 77 (15 s)",
        "Installing 77 packages: fetching 30 of 77 (30 s)",
        "Installing 77 packages: done (32 s)",
    ]


def test_on_a_terminal_the_line_is_drawn_again_with_each_detail(times: Times) -> None:
    terminal = Terminal()
    with Step("Installing", terminal) as step:
        times.now_s += 1.0
        step.detail("fetching 1 of 77")
    assert terminal.getvalue().split("\r\x1b[K") == [
        "", "Installing ...", "Installing: fetching 1 of 77 (1 s)", "Installing: done (1 s)\n",
    ]  # fmt: skip
