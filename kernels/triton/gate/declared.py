"""The declared configurations: a file of kernels has them in the file of its name in this folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.triton.gate.compilation import Compilation

FOLDER = Path(__file__).parent


def module_names() -> list[str]:
    """Names of the files with configurations, as `norm` for kernels/triton/norm.py, found without importing any."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if "\ndef compilations(" in path.read_text("utf-8"))


def declared(module: str) -> list[Compilation]:
    """The configurations of one file of kernels by its name. Raises ModuleNotFoundError where it has none."""
    found: list[Compilation] = importlib.import_module(f"kernels.triton.gate.{module}").compilations()
    return found
