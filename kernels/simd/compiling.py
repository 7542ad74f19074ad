"""Compilation of the functions here, and the folder that keeps compiled code.

Compiled code is kept in a folder named after the sources: Numba itself looks only at the file that a function stands in, not at
those it calls. An operator may name with NUMBA_CACHE_DIR where that folder is made. Folders of other versions, 14 MB each, are
removed when none of them has started for UNUSED_S.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numba

UNUSED_S = 90 * 24 * 3600.0

log = logging.getLogger("gatehouse.engine")

_NAME = re.compile("simd-[0-9a-f]{16}(-unused)?")


def _folder() -> Path:
    """Where compiled code can be kept from start to start, or for this process alone where nothing else can be written."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for source in (*sorted(here.glob("*.py")), *sorted(here.parent.glob("*.py"))):  # constants of `kernels` are compiled in too
        digest.update(source.read_bytes())
    users = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "gatehouse")
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or users, f"simd-{digest.hexdigest()[:16]}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        os.utime(folder)  # it is used, see below
    except OSError as error:
        log.warning("compiled kernels cannot be kept, every start compiles them again: %s", error)
        return Path(tempfile.mkdtemp(prefix="gatehouse-simd-"))
    if not any(folder.iterdir()):
        log.info("compiling kernels for this processor, once: a few seconds, or a minute where it is slow or busy")
    _remove_unused(folder)
    return folder


def _remove_unused(own: Path) -> None:
    """Remove the folders of versions of which none has started for long. One that runs has read all of its own, and one that
    starts has just said that it uses it; each vanishes at once, whatever is half removed bears another name."""
    for folder in own.parent.glob("simd-*"):
        try:
            if folder == own or not _NAME.fullmatch(folder.name) or folder.stat().st_mtime > time.time() - UNUSED_S:
                continue
            shutil.rmtree(folder.rename(folder.with_name(f"{folder.name.removesuffix('-unused')}-unused")))
        except OSError as error:
            log.debug("an unused folder of compiled kernels stays: %s", error)


numba.config.CACHE_DIR = str(_folder())

# Division by zero is not looked for, and numbers are not reordered: what may be fused or reordered says so in `vectors`.
_OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy"}

part = numba.njit(error_model="numpy", cache=False)
"""A function that others call and that is compiled with them."""

task = partial(numba.cfunc, numba.types.void(numba.types.int64), nopython=True, **_OPTIONS)()
"""A function of the address of its arguments that each thread of a team runs, see `kernels.simd.threads`."""


def entry(num_integers: int, num_floats: int = 0) -> Any:
    """A function that Python calls, of so many int64 and then float32, compiled at once. It lets go of Python's lock."""
    kinds = [numba.types.int64] * num_integers + [numba.types.float32] * num_floats
    return numba.njit(numba.types.void(*kinds), nogil=True, **_OPTIONS)
