"""Limits for the values of engine options, used in the type annotations of `EngineOptions`. Knows no option."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.environment import num_cores
from engine.number_checks import is_integer, is_number

THREADS_PER_CORE_MAX = 16


@dataclass(frozen=True, slots=True)
class Limit:
    """`allows`: whether a value is allowed. If not, `words` follow the option's name in the error."""

    allows: Callable[[Any], bool]
    words: str
    shows_value: bool = True

    def refusal(self, value: object) -> str:
        return f"{self.words}, not {value!r}" if self.shows_value else self.words


def one_of(*choices: str) -> Limit:
    return Limit(lambda value: value in choices, f"must be one of {', '.join(choices)}")


def at_most(most: int, why: str = "") -> Limit:
    return Limit(lambda value: value <= most, f"must be at most {most}{why}")


def above_zero(most: float) -> Limit:
    return Limit(lambda value: is_number(value) and 0.0 < value <= most, f"must be above 0 and at most {most:g}")


def gib_up_to(most: float) -> Limit:
    return Limit(lambda value: is_number(value) and 0.0 <= value <= most, f"must be a number of GiB between 0 and {most:g}")


def text(most: int) -> Limit:
    words = f"must be text of 1 to {most} characters"
    return Limit(lambda value: isinstance(value, str) and 1 <= len(value) <= most, words, shows_value=False)


def power_of_two(most: int) -> Limit:
    words = f"must be a power of two from 1 to {most}"
    return Limit(lambda value: _is_count(value) and value <= most and not value & (value - 1), words)


def threads() -> Limit:
    return at_most(THREADS_PER_CORE_MAX * num_cores(), f", {THREADS_PER_CORE_MAX} for each usable core")


def files(most: int) -> Limit:
    return Limit(lambda value: len(value) <= most, f"takes at most {most} files", shows_value=False)


def _is_count(value: object) -> bool:
    return is_integer(value) and value >= 1


def _are_paths(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(path, Path) for path in value)


def _are_mappings(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, Mapping) for item in value)


COUNT = Limit(_is_count, "must be at least 1, and an integer")
FLAG = Limit(lambda value: isinstance(value, bool), "must be True or False")
PATHS = Limit(_are_paths, "must be a list of paths")
MAPPINGS = Limit(_are_mappings, "must be a list of objects")
