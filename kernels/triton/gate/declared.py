"""The declared configurations: those of a kernel module are in the module of the same name in this package."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.triton.gate.compilation import Compilation

FOLDER = Path(__file__).parent


def module_names() -> list[str]:
    """Names of the modules with configurations, as `norm` for kernels/triton/norm.py, found without importing any."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if "\ndef compilations(" in path.read_text("utf-8"))


def declared(module: str) -> list[Compilation]:
    """The configurations of one kernel module by its name. Raises ModuleNotFoundError if it has none."""
    found: list[Compilation] = importlib.import_module(f"kernels.triton.gate.{module}").compilations()
    return found
