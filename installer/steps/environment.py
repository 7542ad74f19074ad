"""Makes `.venv`: from nothing, anew after an interruption, or just adding the test packages. It is complete or absent."""

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
from steps.locks import Lock, read_lock, read_test_lock
from steps.place import REPO, VENV, venv_python
from steps.progress import Step
from steps.refusal import Refusal

_NEEDED_MIB = {"cpu": 2200, "gpu": 9000}
_NEEDED_TEST_MIB = 2400  # two versions of Triton are 1650 of them
_LOCK_POLL_S = 0.3
# Tests import only some of the files, and Python compiles those on import. An environment for serving is compiled completely:
# the service may not be able to write there.
_WITHOUT_BYTECODE = ("--no-compile",)
# Where the builds of torch without a GPU's libraries are published; the ordinary index has one build per system.
_SMALL_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_SCRIPT = """#!{python}
import sys
from appliance.cli.main import main
sys.exit(main())
"""


def profile_for(device: str) -> str:
    """Return the lock to install, cpu or gpu, for `device` (auto, cuda, cpu) and what the machine has."""
    if device == "cpu":
        return "cpu"
    found = machine.has_nvidia_gpu()
    if device == "cuda" and not found:
        raise Refusal(
            "--device cuda was asked for, but no NVIDIA driver answers on this machine.",
            "Install the driver (nvidia-smi must show the GPU), or omit --device to run on the CPU.",
        )
    return "gpu" if found else "cpu"


def ensure(profile: str, *, with_tests: bool, venv: Path = VENV) -> None:
    """Make `venv` complete for `profile`. Raises Refusal if that cannot be done, and leaves no `venv` of ours behind."""
    run = read_lock(profile)
    test = read_test_lock() if with_tests else None
    if stamp.state(venv, run, test) == "ready":
        _report_other_python(venv)
        return
    machine.check_interpreter()
    if not os.access(REPO, os.W_OK):
        raise Refusal(f"{REPO} cannot be written.", "Run the installer as the user who owns this folder.")
    with _only_one_installer():
        state = stamp.state(venv, run, test)
        if state == "foreign":
            raise Refusal(f"{venv} was not made by this installer.", "Move it away, then run the same command again.")
        if state in ("broken", "stale"):
            _remove(venv, "left by an interrupted run" if state == "broken" else "made for an older version")
        if state != "ready":
            needed_mib = (0 if state == "untested" else _NEEDED_MIB[profile]) + (_NEEDED_TEST_MIB if with_tests else 0)
            machine.check_disk(venv, needed_mib * machine.MIB, "the environment")
            _build(venv, run, test, add_tests_only=state == "untested")


def _report_other_python(venv: Path) -> None:
    """Tell a user whose existing environment has another Python than the one that runs the installer."""
    made = stamp.read_stamp(venv)
    if made is not None and made.python.rpartition(".")[0] != platform.python_version().rpartition(".")[0]:
        print(
            f"{venv} has Python {made.python} and is used; remove it to get one with {platform.python_version()}.", flush=True
        )


def describe(profile: str, venv: Path = VENV) -> str:
    """Return the state of `venv` in a few words, which begin with `ready` if the appliance can start from it."""
    words = {
        "absent": "not there yet",
        "foreign": "there, but not made by this installer",
        "broken": "incomplete (an interrupted run); the next start recreates it",
        "stale": "made for an older version; the next start recreates it",
        "untested": "ready, without the test packages",
        "ready": "ready, with the test packages",
    }
    return words[stamp.state(venv, read_lock(profile), read_test_lock())]


@contextlib.contextmanager
def _only_one_installer() -> Iterator[None]:
    """Hold a lock on the clone's folder itself: it leaves no file behind and ends with the process.

    pip inherits the lock, so that a pip that outlives a killed installer still blocks the next installer.
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
                    print("Another installer is at work in this folder; waiting for it to finish ...", flush=True)
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
            raise Refusal(
                "Python could not make the environment.",
                f"On Debian or Ubuntu: apt-get install python{version}-venv; then run the same command again.",
                pip.relevant(lines),
            )


def _install_torch(venv: Path, lock: Lock, options: Sequence[str]) -> None:
    """Install torch first, so that no other package can pull in another build of it. `options` are pip's."""
    version = lock.version("torch")
    with Step(f"Installing torch {version} (the largest part)") as step:
        if lock.profile == "gpu" or sys.platform != "linux":
            pip.install(venv, [["--no-deps", *options, f"torch=={version}"]], step, expected=1)
            return
        _install_small_torch(venv, version, step, options)


def _install_small_torch(venv: Path, version: str, step: Step, options: Sequence[str]) -> None:
    """Install the build without a GPU's libraries: from the index that pip is configured for, else from where it is published.

    If neither has it, install the locked version as the index has it, with its dependencies: larger, but just as good.
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
        machine.check_disk(venv, _NEEDED_MIB["gpu"] * machine.MIB, "the only build of torch that the package index has")
        pip.install(venv, [[*options, f"torch=={version}"]], step, expected=1)
        step.outcome("done, with a GPU's libraries, which are not used: no index that answered has a build without them")


def _install_lock(venv: Path, lock: Lock, what: str, options: Sequence[str]) -> None:
    """Install a whole lock without resolving anything: it is the full closure. `options` are pip's."""
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
    """Install the oldest and the newest Triton that the kernels support; Triton exists only for Linux.

    The version that torch needs, or else the newest, goes into the environment; any other into a folder `triton-<version>`.
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
    """Put the clone on the environment's path and write the `gatehouse` command: no build step; edits take effect at once."""
    (site_packages,) = venv.glob("lib/python3*/site-packages")
    (site_packages / "gatehouse.pth").write_text(f"{REPO}\n", "utf-8")
    script = venv / "bin" / "gatehouse"
    script.write_text(_SCRIPT.format(python=venv_python(venv)), "utf-8")
    script.chmod(0o755)
