"""How long a newcomer waits: `python3 installer up` in a fresh clone with an empty home, then once more.

Clones the committed state into a temporary directory, so that this checkout's environment does not help. The first start is
dominated by downloads from the package index; the second start shows the time without them.

    python3 -m bench.first_start            prints one row and adds it to bench/results/
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from bench.ports import free_port
from bench.rows import TREE, argument_parser, publish, row_header

READY_TIMEOUT_S = 600.0


def seconds_to_ready(clone: Path, home: Path) -> float:
    """Run `up` until the appliance reports that it is ready, then stop it with Ctrl-C. Raises RuntimeError if that fails."""
    port = free_port()
    kept = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("PIP_")}
    started_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(clone / "installer"), "up", "--port", str(port)],
        env={**kept, "HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not _is_ready(port):
        if process.poll() is not None or time.perf_counter() - started_s > READY_TIMEOUT_S:
            process.kill()
            raise RuntimeError(f"not ready after {time.perf_counter() - started_s:.0f} s, exit status {process.poll()}")
        time.sleep(0.05)
    elapsed_s = time.perf_counter() - started_s
    process.send_signal(signal.SIGINT)
    if process.wait(60) != 0:
        raise RuntimeError(f"Ctrl-C ended in exit status {process.returncode}")
    return elapsed_s


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Measure, print the row, and add it to the results."""
    options = argument_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone, home = Path(folder, "clone"), Path(folder, "home")
        home.mkdir()
        subprocess.run(["git", "clone", "-q", str(TREE), str(clone)], check=True)
        first_s, second_s = seconds_to_ready(clone, home), seconds_to_ready(clone, home)
    row = {**row_header("first_start"), "first_ready_s": round(first_s, 2), "second_ready_s": round(second_s, 2)}
    publish(row, options)


if __name__ == "__main__":
    main()
