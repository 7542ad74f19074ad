"""Progress, failure and results of compiling kernels for the shapes of a model. Does not import a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Variants(NamedTuple):
    """Numbers of kernel variants, one variant for each way to call a kernel: requested, ready, and how many of these were on
    disk."""

    num_asked: int = 0
    num_ready: int = 0
    num_found: int = 0

    @property
    def num_compiled(self) -> int:
        return self.num_ready - self.num_found


class KernelCache(NamedTuple):
    """Where compiled kernels are kept on disk, and a digest of compiler and sources: kernels of the same revision are the
    same."""

    folder: Path
    revision: str


class CompilationFailed(RuntimeError):
    """Raised where a kernel cannot be compiled for this card or loaded on it; the message names the kernel and its variant."""
