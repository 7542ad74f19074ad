"""Triton's interpreter replaces the whole language, some hundred names, at each launch and each call of a function by a kernel.

So in 3.6.0 and 3.9.0, and it takes more than a quarter of a test's time. Here it is replaced once.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def replace_language_once() -> None:
    """Let what functions of a module need of the interpreter's language stand for the rest of the process once one of them has
    asked for it. Nothing can be compiled in such a process."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    replace: Callable[[Any], Any] = interpreter._patch_lang
    replaced: set[str] = set()

    def replace_once(function: Any) -> Any:
        if function.__module__ not in replaced:
            replace(function)
            replaced.add(function.__module__)
        return interpreter._LangPatchScope()  # the end of a launch finds nothing to take back

    vars(interpreter)["_patch_lang"] = replace_once
