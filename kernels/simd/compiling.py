"""Compilation of the functions in this package, and the directory of compiled code.

Compiled code is kept in a directory named after the sources: Numba itself checks only the file that defines a function, not the
functions it calls. NUMBA_CACHE_DIR sets where that directory is created. The directory of another version, 14 MB, is removed if
that version has not been started for UNUSED_S.
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

_DIRECTORY_NAME = re.compile("simd-[0-9a-f]{16}(-unused)?")


def cache_directory() -> Path:
    """A directory that keeps compiled code between starts; if none is writable, one for this process only."""
    digest, package = hashlib.sha256(), Path(__file__).parent
    # constants of `kernels` are compiled in too
    for source in (*sorted(package.glob("*.py")), *sorted(package.parent.glob("*.py"))):
        digest.update(source.read_bytes())
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "gatehouse")
    directory = Path(os.environ.get("NUMBA_CACHE_DIR") or user_cache, f"simd-{digest.hexdigest()[:16]}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        os.utime(directory)  # marks it as used, see below
    except OSError as error:
        log.warning("compiled kernels cannot be kept, every start compiles them again: %s", error)
        return Path(tempfile.mkdtemp(prefix="gatehouse-simd-"))
    if not any(directory.iterdir()):
        log.info("compiling kernels for this processor, once: a few seconds, or a minute where it is slow or busy")
    _remove_unused(directory)
    return directory


def _remove_unused(current: Path) -> None:
    """Remove the directories of versions that have not been started for a long time. A running version has loaded all of its
    directory, and a starting one has just marked its own as used. Each is renamed first, so that a half-removed one is never
    used."""
    for directory in current.parent.glob("simd-*"):
        try:
            if (
                directory == current
                or not _DIRECTORY_NAME.fullmatch(directory.name)
                or directory.stat().st_mtime > time.time() - UNUSED_S
            ):
                continue
            shutil.rmtree(directory.rename(directory.with_name(f"{directory.name.removesuffix('-unused')}-unused")))
        except OSError as error:
            log.debug("an unused folder of compiled kernels stays: %s", error)


numba.config.CACHE_DIR = str(cache_directory())

# Division by zero is not checked, and numbers are not reordered: `vectors` marks what may be fused.
_OPTIONS: dict[str, Any] = {"cache": True, "error_model": "numpy"}

subroutine = numba.njit(error_model="numpy", cache=False)
"""A function that other compiled functions call; it is compiled with them."""

task = partial(numba.cfunc, numba.types.void(numba.types.int64), nopython=True, **_OPTIONS)()
"""A function of the address of its arguments, run by each thread of a team; see `kernels.simd.threads`."""


def entry(num_integers: int, num_floats: int = 0) -> Any:
    """A function that Python calls, with `num_integers` int64 and then float32, compiled at once. It releases the GIL."""
    argument_types = [numba.types.int64] * num_integers + [numba.types.float32] * num_floats
    return numba.njit(numba.types.void(*argument_types), nogil=True, **_OPTIONS)
