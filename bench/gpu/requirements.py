"""What the bench needs of the machine, checked before anything is started. Imports nothing but the standard library.

The engine half stands on few packages. A GPU machine without the web half's packages must do, so one that is only needed for
grammars, which are not measured here, is replaced by a stand-in that says so when it is used.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

PYTHON_MIN = (3, 11)
NEEDED = {
    "torch": "tensors and CUDA; 2.11 or newer",
    "triton": "the kernels; 3.6 to 3.9",
    "numpy": "host-side batch arrays",
    "safetensors": "engine.runner.weights imports it, though nothing is read here",
    "tokenizers": "engine.text imports it, though prompts are token ids here",
    "jinja2": "engine.chat_template imports it, though no template is rendered here",
}
GRAMMARS = "llguidance"


def missing(names: dict[str, str] | None = None) -> list[str]:
    """One line for each package that is not there."""
    wanted = NEEDED if names is None else names
    lines = [f"  {name}: {reason}" for name, reason in wanted.items() if importlib.util.find_spec(name) is None]
    if sys.version_info < PYTHON_MIN:
        lines.insert(0, f"  Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer, not {sys.version.split()[0]}")
    return lines


def check() -> None:
    """Exit with one message that names everything that is missing; replace what only grammars need."""
    lines = missing()
    if lines:
        raise SystemExit("bench/gpu.sh cannot run here; missing are:\n" + "\n".join(lines))
    if importlib.util.find_spec(GRAMMARS) is None:
        sys.modules[GRAMMARS] = StandIn(GRAMMARS)


class StandIn(ModuleType):
    """Has every name; each is a class that cannot be made."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError(f"{self.__name__} is not installed: grammars cannot be used in this process")

        return type(name, (), {"__init__": refuse})
