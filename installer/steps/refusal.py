"""The one way the installer says no: what is wrong and what to do, in plain words, exit status 1."""

from __future__ import annotations


class Refusal(Exception):
    """Something stands in the way that a person can change. `details` are lines of evidence, `advice` is what to do."""

    def __init__(self, problem: str, advice: str = "", details: tuple[str, ...] = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.advice = advice
        self.details = details

    def text(self) -> str:
        """Return the message for a terminal: evidence first, then the problem and the advice on the last line."""
        evidence = "".join(f"  | {line}\n" for line in self.details)
        return f"{evidence}{self.problem}{' ' + self.advice if self.advice else ''}"
