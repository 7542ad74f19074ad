"""Regenerates the lock files from pyproject.toml: `python3 installer/relock.py`. Needs `uv` on the PATH; for developers only.

One resolution produces three files, so that they agree: `gpu.txt` is the closure of the dependencies with the `gpu` extra,
`cpu.txt` the same without the packages that only the GPU build of torch needs, `test.txt` what the `test` extra adds to either.
`triton.txt` is separate: torch pins one version of Triton in `gpu.txt`, but kernels are tested at both ends of their range.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
REQUIREMENTS = REPO / "installer" / "requirements"
# The version on our machines; raised by hand, together with the kernels' tests.
TORCH = "2.13.0"
PYTHON = "3.11"
_GPU_ONLY = re.compile(r"^(triton|cuda-.*|nvidia-(?!ml-py).*)==")
_ELSEWHERE = re.compile(r"sys_platform == '(win32|emscripten)'")  # unsupported platforms
_HEADER = "# Exact versions, for {what}. Made by installer/relock.py from pyproject.toml; change that one, not this one.\n"


def reasons(pyproject: str) -> dict[str, str]:
    """Return the reason for each package, from the comment after it in pyproject.toml."""
    found = re.findall(r'^\s+"([A-Za-z0-9._-]+)[^"]*",[ \t]*(?:#[ \t]*(.*))?$', pyproject, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): reason for name, reason in found}


def resolve(pyproject: str, extras: tuple[str, ...], constraints: str) -> list[str]:
    """Return the lines `name==version ; marker  # via …` of one resolution that holds on Linux and macOS."""
    with tempfile.TemporaryDirectory() as folder:
        project, limits = Path(folder, "pyproject.toml"), Path(folder, "constraints.txt")
        project.write_text(pyproject, "utf-8")
        limits.write_text(constraints, "utf-8")
        options = ["--universal", "--annotation-style", "line", "--constraint", str(limits)]
        options += [part for extra in extras for part in ("--extra", extra)]
        lines = _uv_compile([*options, str(project)], folder=folder).splitlines()
    return [line for line in lines if line and not line.startswith("#") and not _ELSEWHERE.search(line)]


def _uv_compile(arguments: list[str], *, folder: str | None = None, text: str | None = None) -> str:
    """Return the output of `uv pip compile` with `text` as its standard input. Exits with uv's message if it fails."""
    command = ["uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--python-version", PYTHON, *arguments]
    answer = subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        sys.exit(answer.stderr)
    return answer.stdout


def ends_of_range(requirement: str) -> tuple[str, str]:
    """Return the oldest and newest version that `requirement` allows, as lines `name==version`."""
    oldest, newest = (
        _uv_compile(["--no-annotate", "--no-deps", "--resolution", preference, "-"], text=requirement).strip()
        for preference in ("lowest-direct", "highest")
    )
    return oldest, newest


def triton_text(pyproject: str, why: dict[str, str]) -> str:
    """Return the text of the lock file of Triton's versions, oldest first."""
    (wanted,) = [
        line for line in tomllib.loads(pyproject)["project"]["optional-dependencies"]["gpu"] if line.startswith("triton")
    ]
    oldest, newest = ends_of_range(wanted)
    what = "the kernels' tests: the oldest and the newest that pyproject.toml allows"
    return _HEADER.format(what=what) + f"\n# {why['triton']}\n{oldest}\n# the same, the newest\n{newest}\n"


def lock_text(what: str, lines: list[str], why: dict[str, str]) -> str:
    """Return the text of a lock file: direct dependencies, each under its reason, then their dependencies."""
    direct, others = [], []
    for line in lines:
        pin, _, via = line.partition("  #")
        name = pin.partition("==")[0].strip()
        if name in why and "pyproject.toml" in via:
            direct.append(f"# {why[name]}\n{pin.strip()}\n")
            continue
        parents = [parent for parent in via.replace("via", "", 1).split(",") if parent.strip() and "-c " not in parent]
        others.append(f"{pin.strip()}  # for {', '.join(parent.strip() for parent in parents)}\n")
    return _HEADER.format(what=what) + "\n" + "".join(direct) + "\n# What these need in turn\n" + "".join(others)


def without_gpu(lines: list[str]) -> list[str]:
    """Return `lines` for a machine without a GPU. On Linux, torch without GPU libraries has the local version +cpu."""
    kept = []
    for line in lines:
        if line.startswith("torch=="):
            kept.append(f"torch=={TORCH}+cpu ; sys_platform == 'linux'  # via pyproject.toml")
            kept.append(f"torch=={TORCH} ; sys_platform != 'linux'  # via pyproject.toml")
        elif not _GPU_ONLY.match(line):
            kept.append(line)
    return kept


def main() -> None:
    """Write the four lock files."""
    pyproject = (REPO / "pyproject.toml").read_text("utf-8")
    version = tomllib.loads(pyproject)["project"]["version"]
    why = reasons(pyproject)
    torch = f"torch=={TORCH}\n"
    run = resolve(pyproject, ("gpu",), torch)
    pins = "\n".join(line.partition("  #")[0] for line in run)
    everything = resolve(pyproject, ("gpu", "test"), pins)
    known = {line.partition("  #")[0].strip() for line in run}
    added = [line for line in everything if line.partition("  #")[0].strip() not in known]
    texts = {
        "gpu": lock_text("machines with an NVIDIA GPU", run, why),
        "cpu": lock_text("machines without a GPU", without_gpu(run), why),
        "test": lock_text("the tests, beside cpu.txt or gpu.txt", added, why),
        "triton": triton_text(pyproject, why),
    }
    for profile, text in texts.items():
        (REQUIREMENTS / f"{profile}.txt").write_text(text, "utf-8")
    print(f"locked gatehouse {version}: " + ", ".join(f"{name} {text.count('==')}" for name, text in texts.items()))


if __name__ == "__main__":
    main()
