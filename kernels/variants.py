"""Progress and failure of compiling kernels for the shapes of a model. Knows no compiler."""

from __future__ import annotations

from typing import NamedTuple


class Variants(NamedTuple):
    """Kernels asked for, each way to call one counted; how many of them are ready, and how many of those were found on disk."""

    num_asked: int = 0
    num_ready: int = 0
    num_found: int = 0

    @property
    def num_compiled(self) -> int:
        return self.num_ready - self.num_found


class CompilationFailed(RuntimeError):
    """A kernel that is to serve cannot be compiled for this card or loaded on it; the message names it and how it is called."""
