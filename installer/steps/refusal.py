"""The only error of the installer: what is wrong and what to do, in plain words, exit status 1."""

from __future__ import annotations


class Refusal(Exception):
    """A problem that a person can solve. `details` are lines of evidence, `advice` is what to do."""

    def __init__(self, problem: str, advice: str = "", details: tuple[str, ...] = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.advice = advice
        self.details = details

    def text(self) -> str:
        """Return the message for a terminal: evidence first, then the problem and the advice on the last line."""
        evidence = "".join(f"  | {line}\n" for line in self.details)
        return f"{evidence}{self.problem}{' ' + self.advice if self.advice else ''}"
