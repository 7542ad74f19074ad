"""The bench's requirements, checked before anything is started. Imports none of the packages that it checks.

The engine half needs few packages. A GPU machine without the web half's packages must suffice, so a package that is only needed
for grammars, which are not measured here, is replaced by a stand-in that raises an error when used.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib import metadata
from types import ModuleType
from typing import Any

from engine.triton_toolchain import toolchain_problem

NEEDED = {
    "torch": "tensors and CUDA",
    "triton": "the kernels",
    "numpy": "host-side batch arrays",
    "safetensors": "engine.weights imports it, though nothing is read here",
    "tokenizers": "engine.text.tokenizer imports it, though prompts are token ids here",
    "jinja2": "engine.text.chat_template imports it, though no template is rendered here",
}
NEEDED_TO_REHEARSE = {"pytest": "a rehearsal corrects Triton's interpreter as the tests do"}
OLDEST = {"torch": (2, 11), "triton": (3, 6)}
BELOW = {"triton": (3, 10)}
"""Both as in pyproject.toml."""
OLD_INTERPRETER, NUMPY_TOO_NEW = (3, 7), (2, 4)
"""Before this version, Triton's interpreter converts arrays to numbers in a way that numpy rejects from this version on."""
GRAMMARS = "llguidance"


def missing(names: dict[str, str]) -> list[str]:
    """One line for each missing package; `names`: what each is needed for."""
    return [f"  {name} is missing: {reason}" for name, reason in names.items() if importlib.util.find_spec(name) is None]


def unsuitable(versions: dict[str, tuple[int, ...]], *, rehearse: bool) -> list[str]:
    """One line for each package of an unsuitable version."""
    lines = []
    for name, version in versions.items():
        if version < OLDEST.get(name, ()):
            lines.append(f"  {name} {_text(version)}: {_text(OLDEST[name])} or newer is needed")
        elif name in BELOW and version >= BELOW[name]:
            lines.append(f"  {name} {_text(version)}: a version below {_text(BELOW[name])} is needed")
    if rehearse and versions.get("triton", OLD_INTERPRETER) < OLD_INTERPRETER and versions.get("numpy", ()) >= NUMPY_TOO_NEW:
        needed = f"a rehearsal with Triton {_text(versions['triton'])} needs a version below {_text(NUMPY_TOO_NEW)}"
        lines.append(f"  numpy {_text(versions['numpy'])}: {needed}; a run on a GPU does not")
    return lines


def check(*, rehearse: bool = False) -> None:
    """Exit with one message that names everything missing or unsuitable; replace the package that only grammars need."""
    lines = missing(NEEDED | NEEDED_TO_REHEARSE if rehearse else NEEDED) or unsuitable(_installed(), rehearse=rehearse)
    if not rehearse and (problem := toolchain_problem()):
        lines.append(f"  {problem}")
    if lines:
        raise SystemExit("bench/gpu.sh cannot run here:\n" + "\n".join(lines))
    if importlib.util.find_spec(GRAMMARS) is None:
        replace_grammars()


def replace_grammars() -> None:
    """Let imports of the package of grammars find the stand-in."""
    sys.modules[GRAMMARS] = StandIn(GRAMMARS)


def _installed() -> dict[str, tuple[int, ...]]:
    """Package → (major, minor) version. A package installed without version metadata is not checked."""
    found = {}
    for name in NEEDED:
        try:
            found[name] = tuple(map(int, re.findall(r"\d+", metadata.version(name).partition("+")[0])[:2]))
        except metadata.PackageNotFoundError:
            continue
    return found


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


class StandIn(ModuleType):
    """A module in which every name exists, as a class that cannot be instantiated."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError(f"{self.__name__} is not installed: grammars cannot be used in this process")

        return type(name, (), {"__init__": refuse})
