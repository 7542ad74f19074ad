"""The declared configurations: those of kernels/triton/rows/norm.py are in kernels/triton/gate/rows/norm.py, and so on."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.triton.gate.compilation import Compilation

FOLDER = Path(__file__).parent


def module_names() -> list[str]:
    """Names of the modules with configurations, as `rows.norm`, found without importing any."""
    paths = [path for path in FOLDER.glob("*/*.py") if "\ndef compilations(" in path.read_text("utf-8")]
    return sorted(f"{path.parent.name}.{path.stem}" for path in paths)


def declared(module: str) -> list[Compilation]:
    """The configurations of one kernel module by its name. Raises ModuleNotFoundError if it has none."""
    found: list[Compilation] = importlib.import_module(f"kernels.triton.gate.{module}").compilations()
    return found
