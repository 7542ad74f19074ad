"""Finds stop strings in text that comes in pieces, and holds back what may be the beginning of one.

One Knuth-Morris-Pratt automaton per string, so that the cost of a character does not depend on how much is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Fed with text; gives back the text that is certain not to belong to a stop string. `matched` is set when one is found."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._automata = [_Automaton(string) for string in strings]
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that may be shown now; where a stop string ends inside `text`, what stands before it."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        for index, character in enumerate(text):
            complete = [automaton.length for automaton in self._automata if automaton.step(character)]
            if complete:
                longest = max(complete)  # of those that end here, the one that began first
                self.matched = next(a.string for a in self._automata if a.length == longest and a.complete)
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - longest]
        return self._release(self._held + text)

    def flush(self) -> str:
        """Return what is held back: the text has ended and no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _release(self, seen: str) -> str:
        hold = max(automaton.matched_len for automaton in self._automata)
        self._held = seen[len(seen) - hold :]
        return seen[: len(seen) - hold]


class _Automaton:
    """How many characters of `string` the text seen so far ends with."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = len(string)
        self.matched_len = 0
        self._fallback = _fallbacks(string)

    @property
    def complete(self) -> bool:
        return self.matched_len == self.length

    def step(self, character: str) -> bool:
        while self.matched_len and self.string[self.matched_len] != character:
            self.matched_len = self._fallback[self.matched_len - 1]
        if self.string[self.matched_len] == character:
            self.matched_len += 1
        return self.complete


def _fallbacks(string: str) -> list[int]:
    """Return, for each prefix of `string`, the length of its longest proper suffix that is also its prefix."""
    table = [0] * len(string)
    matched = 0
    for index in range(1, len(string)):
        while matched and string[index] != string[matched]:
            matched = table[matched - 1]
        if string[index] == string[matched]:
            matched += 1
        table[index] = matched
    return table
