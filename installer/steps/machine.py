"""Checks of this machine: the Python interpreter, its venv module, disk space, NVIDIA GPU."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from steps.errors import InstallerError
from steps.paths import nearest_existing

MIB = 1024 * 1024
NVIDIA_MARKS = ("/proc/driver/nvidia/version", "/dev/nvidia0")
NVIDIA_SMI_TIMEOUT_S = 20


def check_interpreter() -> None:
    """Raise InstallerError for a platform or Python that cannot create the environment."""
    if os.name != "posix":
        raise InstallerError("Gatehouse runs on Linux and macOS.", "On Windows, use it inside WSL 2.")
    if sys.maxsize < 2**32:
        raise InstallerError(f"{sys.executable} is a 32-bit Python.", "Start the installer with a 64-bit one.")
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise InstallerError(
            f"This Python has no {' and no '.join(missing)} module, so it cannot create an environment.",
            f"On Debian or Ubuntu: apt-get install python{version}-venv; then run the same command again.",
        )


def describe_interpreter() -> str:
    """Return a line that describes the running Python."""
    return f"Python {platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of `path`, which need not exist."""
    return shutil.disk_usage(nearest_existing(path)).free


def check_disk(path: Path, needed_bytes: int, purpose: str) -> None:
    """Raise InstallerError if the file system of `path` has less than `needed_bytes` free."""
    free = free_bytes(path)
    if free < needed_bytes:
        raise InstallerError(
            f"Not enough disk space at {nearest_existing(path)} for {purpose}: "
            f"{needed_bytes // MIB} MiB are needed, {free // MIB} MiB are free.",
            "Free some space, or put the clone on a larger disk; nothing was installed.",
        )


def has_nvidia_gpu() -> bool:
    """Return whether this machine has a working NVIDIA driver, without importing or installing anything."""
    if any(os.path.exists(mark) for mark in NVIDIA_MARKS):
        return True
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "GPU 0" in answer.stdout
