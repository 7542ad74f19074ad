"""The card's state as its driver reports it: version, clocks, power, temperature. A throttled or shared card is slow."""

from __future__ import annotations

import re
import subprocess

FIELDS = (
    "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,clocks_throttle_reasons.active,"
    "memory.used,mig.mode.current"
)
UNKNOWN = re.compile(r'Field "([^"]+)" is not a valid field')
"""Drivers rename fields from time to time; if one field is unknown, nvidia-smi reports none of the others either."""
WAIT_S = 3.0
CHARS_MAX = 600


def state() -> str:
    """Names and values in one line, without fields unknown to this driver; or the error of the query."""
    fields = FIELDS.split(",")
    while True:
        command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{type(error).__name__}: {error}"
        text = (answer.stdout or answer.stderr).strip()
        unknown = set(UNKNOWN.findall(text)).intersection(fields)
        if not unknown:
            return " | ".join(text.splitlines())[:CHARS_MAX]
        fields = [field for field in fields if field not in unknown]


def version(state: str) -> str | None:
    """The driver's version, from the result of `state`; None if that has none."""
    lines = [line.split(", ") for line in state.split(" | ")]
    found = dict(zip(lines[0], lines[-1], strict=False)) if len(lines) > 1 else {}
    return found.get("driver_version")
