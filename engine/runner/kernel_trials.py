"""Marks of kernels that run for the first time, so that one that ends the engine is not tried at every start.

A kernel that has not run on this kind of card may make an illegal access, which loses the device to the process, or never end.
Before such an alternative (`kernels.alternatives`) runs, a mark is written beside the decisions between kernels. It is removed
when all that the alternative launched has ended. A mark that is left refuses the alternative at later starts:

with a fault       which the process that wrote it saw: at once, for every model on this kind of card that has not decided for
                   the alternative before
without one        if there are DEATHS_MAX of them, for the same model and options: the process was ended while the alternative
                   ran, which may have another cause, such as an operator

in service         if there are DEATHS_MAX of them within SERVICE_FAULTS_S, for the same model and options: the alternative
                   passed its first start, and served when the device failed or did not end (`runner.device_waits`), which may
                   have another cause

A process holds a lock (flock) on its marks, so that others that start meanwhile do not count them; the system releases it
when the process ends. The oldest alternatives have run on a card: they have no marks and are never refused.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.device import is_lost
from engine.errors import EngineBroken
from kernels import ops

log = logging.getLogger("gatehouse.engine")

DEATHS_MAX = 2
"""One death may have any cause: an operator's kill -9, the gateway's at its stop, a lack of memory. A kernel that has ended one
process by itself ends the next one too."""

SERVICE_FAULTS_S = 24 * 60 * 60.0

POLL_S = 0.001
HANG_POLLS = 20_000
"""Twenty seconds and more, for launches that take milliseconds, or a second on a card that is shared. Polls are counted, so
that time in which the process was suspended does not count."""

Alternative = tuple[ops.Choice, str]


class KernelFault(EngineBroken):
    """The device failed, or did not end, while alternatives ran for the first time. They are refused from now on: a new process
    serves without them."""


class TrialsImpossible(Exception):
    """No mark can be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """`start`: the model and options, as a digest. `fault`: what the device did, empty while that is not known. `in_service`:
    it did so after the start."""

    start: str
    choice: str
    alternative: str
    fault: str = ""
    in_service: bool = False


class KernelTrials:
    """The marks of one engine, and those that others of the same kind of card have left."""

    def __init__(self, folder: Path, start: str, device: torch.device) -> None:
        """`folder`: of this kind of card and version of the kernels. `start`: as of `Mark`."""
        self._folder, self._start, self._device = folder, start, device
        self._left = dict(_left_marks(folder))
        self._serving = ExitStack()
        self._ran: list[Alternative] = []

    def refusals(self, choice: ops.Choice) -> dict[str, str]:
        """Why alternatives of a choice do not serve, by their name."""
        marks = [mark for mark in self._left.values() if mark.choice == choice.name and not mark.in_service]
        deaths = Counter(mark.alternative for mark in marks if mark.start == self._start)
        found = {name: f"{number} starts ended while it ran" for name, number in deaths.items() if number >= DEATHS_MAX}
        return self._service_refusals(choice) | found | {mark.alternative: mark.fault for mark in marks if mark.fault}

    def _service_refusals(self, choice: ops.Choice) -> dict[str, str]:
        marks = [
            mark for mark in self._left.values() if mark.in_service and (mark.start, mark.choice) == (self._start, choice.name)
        ]
        faults = Counter(mark.alternative for mark in marks)
        told = "the GPU failed {} times within a day while it served"
        return {name: told.format(number) for name, number in faults.items() if number >= DEATHS_MAX}

    def has_left(self, *alternatives: Alternative) -> bool:
        """Whether a start with the same model and options ended while one of these ran, or one is refused because of faults in
        service."""
        return bool(self._own_paths(alternatives)) or any(
            name in self._service_refusals(choice) for choice, name in alternatives
        )

    def record_service_fault(self, alternatives: Sequence[Alternative], error: Exception) -> None:
        """Mark these alternatives, which served, if `error` comes from a device that has failed, or hangs and cannot be asked.
        The process then ends."""
        unproven = [(choice, name) for choice, name in alternatives if name != choice.oldest]
        if not unproven or not (isinstance(error, DeviceHangs) or is_lost(self._device)):
            return
        listed = ", ".join(f"{choice.name} by {name}" for choice, name in unproven)
        log.error("the GPU failed while newer kernels served (%s): others serve after %d times a day", listed, DEATHS_MAX)
        try:
            files = self._write(unproven, fault=_told(error), in_service=True)
        except TrialsImpossible as impossible:
            log.error("this fault will not be counted: %s", impossible)
            return
        for descriptor in files.values():
            os.close(descriptor)

    @contextmanager
    def first_use(self) -> Iterator[None]:
        """The part of a start in which alternatives run for the first time. If it ends well, what ran in it did not end the
        earlier starts that have left marks for it. Raises `KernelFault`."""
        with self._serving:
            yield
        for path in self._own_paths(self._ran):
            path.unlink(missing_ok=True)
            del self._left[path]

    def serve(self, *alternatives: Alternative) -> None:
        """Mark these alternatives, and no others, until `first_use` ends: as in a block of `running`."""
        self._serving.close()
        self._serving.enter_context(self.running(*alternatives))

    @contextmanager
    def running(self, *alternatives: Alternative) -> Iterator[None]:
        """Mark these alternatives while the block runs and until what it has launched has ended. Raises `KernelFault` if the
        device fails meanwhile or does not end, `TrialsImpossible` before the block if there is no place for marks."""
        unproven = [(choice, name) for choice, name in alternatives if name != choice.oldest]
        files = self._write(unproven)
        try:
            yield
            wait_for(self._device)
        except KernelFault:  # of an alternative in the block
            _remove(files)
            raise
        except Exception as error:
            if files and (isinstance(error, DeviceHangs) or is_lost(self._device)):
                fault = _told(error)
                for descriptor, (choice, name) in zip(files.values(), unproven, strict=True):
                    with suppress(OSError):  # the mark without a fault is left
                        _record(descriptor, Mark(start=self._start, choice=choice.name, alternative=name, fault=fault))
                    os.close(descriptor)
                listed = ", ".join(f"{choice.name} by {name}" for choice, name in unproven)
                raise KernelFault(f"{listed}: {fault}; a new process serves without this kernel") from error
            _remove(files)
            raise
        except BaseException:
            _remove(files)
            raise
        _remove(files)
        self._ran += unproven

    def _own_paths(self, alternatives: Sequence[Alternative]) -> list[Path]:
        keys = [(self._start, choice.name, name) for choice, name in alternatives]
        own = [(path, mark) for path, mark in self._left.items() if not mark.in_service]
        return [path for path, mark in own if (mark.start, mark.choice, mark.alternative) in keys]

    def _write(self, alternatives: Sequence[Alternative], *, fault: str = "", in_service: bool = False) -> dict[Path, int]:
        """Marks that outlive a crash of the machine: their open files, each locked by this process."""
        files: dict[Path, int] = {}
        try:
            if alternatives:
                self._folder.mkdir(parents=True, exist_ok=True)
            for choice, name in alternatives:
                descriptor, path = tempfile.mkstemp(prefix="mark-", dir=self._folder)
                files[Path(path)] = descriptor
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                mark = Mark(start=self._start, choice=choice.name, alternative=name, fault=fault, in_service=in_service)
                _record(descriptor, mark)
            if alternatives:
                _sync(self._folder)
        except OSError as error:
            _remove(files)
            raise TrialsImpossible(f"{self._folder} cannot be written: {error}") from error
        return files


class DeviceHangs(RuntimeError):
    """What was launched does not end."""


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what was launched. Raises `DeviceHangs`, and torch's errors of the device."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    for _ in range(HANG_POLLS):
        if done.query():  # type: ignore[no-untyped-call]
            return
        time.sleep(POLL_S)
    raise DeviceHangs(f"not done after {HANG_POLLS * POLL_S:.0f} s")


def _left_marks(folder: Path) -> Iterator[tuple[Path, Mark]]:
    """Those of processes that have ended. A file without content is one that is being written. Faults in service that are older
    than SERVICE_FAULTS_S are removed."""
    for path in sorted(folder.glob("mark-*")):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                content = file.read()
                state = os.fstat(file.fileno())
                if not content or not state.st_nlink:
                    continue
                mark = _decoded(content)
                if mark.in_service and time.time() - state.st_mtime > SERVICE_FAULTS_S:
                    path.unlink(missing_ok=True)
                    continue
                yield path, mark
        except (BlockingIOError, FileNotFoundError):
            continue  # of a process that lives, which may remove it meanwhile
        except (OSError, ValueError) as error:
            log.warning("a mark of kernels on trial is ignored: %s cannot be read: %s", path, error)


def _decoded(content: bytes) -> Mark:
    """Raises ValueError for what is no mark."""
    try:
        mark = Mark(**json.loads(content))
    except TypeError as error:
        raise ValueError(f"no mark: {error}") from error
    if not all(isinstance(value, bool if name == "in_service" else str) for name, value in asdict(mark).items()):
        raise ValueError("no mark: of another type")
    return mark


def _record(descriptor: int, mark: Mark) -> None:
    os.pwrite(descriptor, json.dumps(asdict(mark)).encode().ljust(os.fstat(descriptor).st_size), 0)
    os.fsync(descriptor)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _told(error: Exception) -> str:
    return f"the GPU failed: {type(error).__name__}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """What it says without torch's advice on how to find out more."""
    return str(error).partition("\n")[0]


def _remove(files: dict[Path, int]) -> None:
    for path, descriptor in files.items():
        path.unlink(missing_ok=True)
        os.close(descriptor)
