"""What this machine offers: the interpreter, its venv module, the disk, an NVIDIA GPU."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from steps.place import nearest_existing
from steps.refusal import Refusal

MIB = 1024 * 1024
NVIDIA_MARKS = ("/proc/driver/nvidia/version", "/dev/nvidia0")
NVIDIA_SMI_TIMEOUT_S = 20


def check_interpreter() -> None:
    """Refuse a platform or a Python that cannot make the environment."""
    if os.name != "posix":
        raise Refusal("Gatehouse runs on Linux and macOS.", "On Windows, use it inside WSL 2.")
    if sys.maxsize < 2**32:
        raise Refusal(f"{sys.executable} is a 32-bit Python.", "Start the installer with a 64-bit one.")
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    if missing:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Refusal(
            f"This Python has no {' and no '.join(missing)} module, so it cannot make an environment.",
            f"On Debian or Ubuntu: apt-get install python{version}-venv; then run the same command again.",
        )


def describe_interpreter() -> str:
    """Return one line about the running Python."""
    return f"Python {platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that would hold `path`."""
    return shutil.disk_usage(nearest_existing(path)).free


def check_disk(path: Path, needed_bytes: int, purpose: str) -> None:
    """Refuse when the file system of `path` has less than `needed_bytes` free."""
    free = free_bytes(path)
    if free < needed_bytes:
        raise Refusal(
            f"Not enough disk space at {nearest_existing(path)} for {purpose}: "
            f"{needed_bytes // MIB} MiB are needed, {free // MIB} MiB are free.",
            "Free some space, or put the clone on a larger disk; nothing was installed.",
        )


def has_nvidia_gpu() -> bool:
    """Return whether a driver of an NVIDIA GPU answers here. Never imports or installs anything to find out."""
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
