"""Creates `.venv`, recreates it after an interruption, or adds the test packages. Afterwards it is complete or absent."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from steps import machine, pip, stamp
from steps.errors import InstallerError
from steps.locks import Lock, read_lock, read_test_lock
from steps.paths import REPO, VENV, venv_python
from steps.progress import Step

_NEEDED_MIB = {"cpu": 2200, "gpu": 9000}
_NEEDED_TEST_MIB = 2400  # including 1650 for two versions of Triton
_LOCK_POLL_S = 0.3
# For tests: Python compiles imported files itself, and tests import only some. An environment for serving is compiled in full,
# because the service may not be able to write there.
_WITHOUT_BYTECODE = ("--no-compile",)
# The index of torch builds without GPU libraries; the default index has one build per platform.
_SMALL_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_SCRIPT = """#!{python}
import sys
from appliance.cli.main import main
sys.exit(main())
"""


def profile_for(device: str) -> str:
    """Return the lock file to install, cpu or gpu, for `device` (auto, cuda, cpu) and this machine."""
    if device == "cpu":
        return "cpu"
    found = machine.has_nvidia_gpu()
    if device == "cuda" and not found:
        raise InstallerError(
            "--device cuda requires an NVIDIA driver, but none works on this machine.",
            "Install the driver (nvidia-smi must show the GPU), or omit --device to run on the CPU.",
        )
    return "gpu" if found else "cpu"


def ensure(profile: str, *, with_tests: bool, venv: Path = VENV) -> None:
    """Make `venv` complete for `profile`. Raises InstallerError if that fails, and then leaves no incomplete `venv` behind."""
    run = read_lock(profile)
    test = read_test_lock() if with_tests else None
    if stamp.state(venv, run, test) == "ready":
        _report_other_python(venv)
        return
    machine.check_interpreter()
    if not os.access(REPO, os.W_OK):
        raise InstallerError(f"{REPO} is not writable.", "Run the installer as the user who owns this folder.")
    with _only_one_installer():
        state = stamp.state(venv, run, test)
        if state == "foreign":
            raise InstallerError(f"{venv} was not created by this installer.", "Move it away, then run the same command again.")
        if state in ("broken", "stale"):
            _remove(venv, "left by an interrupted run" if state == "broken" else "created for an older version")
        if state != "ready":
            needed_mib = (0 if state == "untested" else _NEEDED_MIB[profile]) + (_NEEDED_TEST_MIB if with_tests else 0)
            machine.check_disk(venv, needed_mib * machine.MIB, "the environment")
            _build(venv, run, test, add_tests_only=state == "untested")


def _report_other_python(venv: Path) -> None:
    """Report an existing environment whose Python version differs from the one that runs the installer."""
    made = stamp.read_stamp(venv)
    if made is not None and made.python.rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
        print(
            f"Using {venv} with Python {made.python}; remove it to use Python {platform.python_version()}.",
            flush=True,
        )


def describe(profile: str, venv: Path = VENV) -> str:
    """Return the state of `venv` in words; the text begins with `ready` if the appliance can start from it."""
    words = {
        "absent": "not created yet",
        "foreign": "not created by this installer",
        "broken": "incomplete (an interrupted run); the next start recreates it",
        "stale": "created for an older version; the next start recreates it",
        "untested": "ready, without the test packages",
        "ready": "ready, with the test packages",
    }
    return words[stamp.state(venv, read_lock(profile), read_test_lock())]


@contextlib.contextmanager
def _only_one_installer() -> Iterator[None]:
    """Hold a lock (flock) on the folder of the clone itself, which needs no lock file and ends with the process.

    pip inherits the lock, so that a pip that outlives a killed installer blocks the next installer.
    """
    folder = os.open(REPO, os.O_RDONLY)
    os.set_inheritable(folder, True)
    reported = False
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not reported:
                    print("Another installer is running in this folder; waiting for it to finish ...", flush=True)
                    reported = True
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(folder)


def _remove(venv: Path, why: str) -> None:
    with Step(f"Removing an environment {why}"):
        shutil.rmtree(venv)


def _build(venv: Path, run: Lock, test: Lock | None, *, add_tests_only: bool) -> None:
    stamp.mark_incomplete(venv)
    options = () if test is None else _WITHOUT_BYTECODE
    try:
        if not add_tests_only:
            _make_venv(venv)
            _install_torch(venv, run, options)
            _install_lock(venv, run, "packages", options)
            _link_clone(venv)
        if test is not None:
            _install_lock(venv, test, "test packages", options)
            _install_tritons(venv, run, options)
        shutil.rmtree(venv / "tmp", ignore_errors=True)
        version = stamp.interpreter_version(venv) or platform.python_version()
        stamp.write_stamp(
            venv, stamp.Stamp(str(venv), version, run.profile, run.digest, test.digest if test is not None else "")
        )
    except BaseException:
        shutil.rmtree(venv, ignore_errors=True)
        raise


def _make_venv(venv: Path) -> None:
    with Step("Creating .venv"):
        answer = subprocess.run(
            [sys.executable, "-m", "venv", str(venv)], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if answer.returncode != 0:
            lines = (answer.stdout + answer.stderr).strip().splitlines()
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise InstallerError(
                "Python could not create the environment.",
                f"On Debian or Ubuntu: apt-get install python{version}-venv; then run the same command again.",
                pip.relevant(lines),
            )


def _install_torch(venv: Path, lock: Lock, options: Sequence[str]) -> None:
    """Install torch first, so that no other package pulls in another build of it. `options` are options of pip."""
    version = lock.version("torch")
    with Step(f"Installing torch {version} (the largest part)") as step:
        if lock.profile == "gpu" or sys.platform != "linux":
            pip.install(venv, [["--no-deps", *options, f"torch=={version}"]], step, expected=1)
            return
        _install_small_torch(venv, version, step, options)


def _install_small_torch(venv: Path, version: str, step: Step, options: Sequence[str]) -> None:
    """Install the build without GPU libraries, from pip's configured index, else from torch's own index.

    If neither has it, install the default build of the locked version with its dependencies: larger, but equivalent.
    """
    pin = f"torch=={version}+cpu"
    try:
        pip.install(venv, [["--no-deps", *options, pin]], step, expected=1)
        return
    except pip.PipFailed as failure:
        if not failure.missing:
            raise
    try:
        elsewhere = ["--retries", "2", "--index-url", _SMALL_TORCH_INDEX]
        pip.install(venv, [["--no-deps", *options, *elsewhere, pin]], step, expected=1)
    except pip.PipFailed:
        machine.check_disk(venv, _NEEDED_MIB["gpu"] * machine.MIB, "the only build of torch in the package index")
        pip.install(venv, [[*options, f"torch=={version}"]], step, expected=1)
        step.outcome("done, with unused GPU libraries: no reachable index has a build without them")


def _install_lock(venv: Path, lock: Lock, what: str, options: Sequence[str]) -> None:
    """Install a lock file without dependency resolution: it is the full closure. `options` are options of pip."""
    wanted = [
        f"{pin.name}=={pin.version}{' ; ' + pin.marker if pin.marker else ''}" for pin in lock.pins if pin.name != "torch"
    ]
    shares = [wanted[first :: pip.num_parallel()] for first in range(pip.num_parallel())]
    commands = []
    for number, share in enumerate(shares):
        listing = venv / "tmp" / f"{lock.profile}-{number}.txt"
        listing.parent.mkdir(exist_ok=True)
        listing.write_text("".join(f"{line}\n" for line in share), "utf-8")
        commands.append(["--no-deps", *options, "-r", str(listing)])
    with Step(f"Installing {len(wanted)} {what}") as step:
        pip.install(venv, commands, step, expected=len(wanted))


def _install_tritons(venv: Path, run: Lock, options: Sequence[str]) -> None:
    """Install the oldest and the newest version of Triton that the kernels support. Does nothing except on Linux.

    The version that torch pins, or else the newest, goes into the environment; the others into folders `triton-<version>`.
    """
    if sys.platform != "linux":
        return
    for left in venv.glob("triton-*"):
        shutil.rmtree(left)
    oldest, newest = (pin.version for pin in read_lock("triton").pins)
    own = next((pin.version for pin in run.pins if pin.name == "triton"), newest)
    commands = []
    for version in (oldest, newest):
        place = [] if version == own else ["--target", str(venv / f"triton-{version}")]
        commands.append(["--no-deps", *place, *options, f"triton=={version}"])
    with Step(f"Installing Triton {oldest} and {newest} for the kernels' tests") as step:
        pip.install(venv, commands, step, expected=len(commands))


def _link_clone(venv: Path) -> None:
    """Add the clone to the import path and write the `gatehouse` command. No build step: edits take effect at once."""
    (site_packages,) = venv.glob("lib/python3*/site-packages")
    (site_packages / "gatehouse.pth").write_text(f"{REPO}\n", "utf-8")
    script = venv / "bin" / "gatehouse"
    script.write_text(_SCRIPT.format(python=venv_python(venv)), "utf-8")
    script.chmod(0o755)
