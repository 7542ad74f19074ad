"""What the driver says of the card: its version, clocks, power and heat. A card that is throttled or shared is a slow one."""

from __future__ import annotations

import subprocess

FIELDS = (
    "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,clocks_throttle_reasons.active,"
    "memory.used,mig.mode.current"
)
WAIT_S = 10.0
CHARS_MAX = 600


def state() -> str:
    """Names and values in one line, or why there are none."""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return " | ".join((answer.stdout or answer.stderr).strip().splitlines())[:CHARS_MAX]
