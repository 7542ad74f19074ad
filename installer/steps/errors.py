"""The error of the installer: the problem and what to do about it; exit status 1."""

from __future__ import annotations


class InstallerError(Exception):
    """A problem that the user can solve. `advice` says how; `details` are lines of output as evidence."""

    def __init__(self, problem: str, advice: str = "", details: tuple[str, ...] = ()) -> None:
        super().__init__(problem)
        self.problem = problem
        self.advice = advice
        self.details = details

    def text(self) -> str:
        """Return the message: the details first, then the problem and the advice on the last line."""
        evidence = "".join(f"  | {line}\n" for line in self.details)
        return f"{evidence}{self.problem}{' ' + self.advice if self.advice else ''}"
