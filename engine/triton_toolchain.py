"""What Triton needs of the machine to launch kernels on a card. Imports nothing but the standard library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig


def toolchain_problem() -> str | None:
    """What is wrong where Triton cannot build what launches its kernels, a piece of C against Python's headers; None where it
    can. Looks for the compiler as Triton does."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "a C compiler is missing: Triton builds what launches its kernels with gcc, clang or what CC names"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    command = [compiler, "-fsyntax-only", f"-I{headers}", "-x", "c", "-"]
    try:
        subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        message = (getattr(error, "stderr", "") or str(error)).strip().partition("\n")[0]
        return f"{compiler} cannot use Python.h (a package python3-dev or the like has it): {message}"
    return None
