"""The context of every measurement: the device, the sizes, figures from earlier parts, and the output of rows."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from bench.gpu.device_lost import DeviceLost
from bench.gpu.rows import Row
from engine.errors import EngineBroken
from engine.runner.kernel_trials import KernelFault

TRACE_CHARS_MAX = 1500

log = logging.getLogger("gatehouse.bench")


class FactMissing(RuntimeError):
    """The calibration lacks a figure from which a limit is computed."""


@dataclass(slots=True)
class Context:
    """State of the running part. `facts`: figures of earlier parts and of this one, such as bandwidth, flops and tokens per
    second; `measured`: names of the rows emitted without an error; `done`: names of the rows emitted by earlier processes, with
    an error or without; `engines`: number of open engines."""

    device: torch.device
    rehearsal: bool
    facts: dict[str, Any]
    write: Callable[[dict[str, Any]], None]
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    failures: int = field(default=0)
    measured: set[str] = field(default_factory=set)
    done: frozenset[str] = frozenset()
    engines: int = field(default=0)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that models compute in: not bfloat16 in a rehearsal, where the interpreter gets it wrong."""
        return torch.float16 if self.rehearsal else torch.bfloat16

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the calibrating copy, read and written. Raises `FactMissing`."""
        return self._fact("bandwidth")

    @property
    def flops(self) -> float:
        """Operations per second of the calibrating product in 16 bits. Raises `FactMissing`."""
        return self._fact("flops")

    @property
    def flops_fp8(self) -> float:
        """Operations per second in fp8 or, if not calibrated, twice those in 16 bits. Raises `FactMissing`."""
        return self._fact("flops_fp8") if "flops_fp8" in self.facts else 2 * self.flops

    def _fact(self, name: str) -> float:
        if name not in self.facts:
            raise FactMissing(f"the calibration gave no {name}")
        return float(self.facts[name])

    @property
    def left_s(self) -> float:
        """Seconds until this part is killed by the main process."""
        return self.deadline_s - self.clock()

    def size(self, real: int, rehearsed: int) -> int:
        return rehearsed if self.rehearsal else real

    def limit(self, row: Row, compute: Callable[[], float]) -> None:
        """Set the limit of a row. If the calibration lacks a figure for it, the row has no limit, and its note says why."""
        try:
            row.limit = compute()
        except FactMissing as missing:
            row.note = "; ".join(note for note in (f"no limit: {missing}", row.note) if note)

    def bandwidth_row(self, name: str, num_bytes: int, times_s: Sequence[float]) -> Row:
        """A row in GB/s from sampled times of calls that each moved `num_bytes`; its limit is the calibrated bandwidth. Raises
        `FactMissing`."""
        rates = [num_bytes / time_s / 1e9 for time_s in times_s]
        return Row(name=name, value=median(rates), limit=self.bandwidth / 1e9, samples=rates)

    def emit(self, row: Row) -> None:
        if not row.error:
            self.measured.add(row.name)
        self.write({"row": row.as_dict()})

    def add_facts(self, **facts: Any) -> None:
        """Add facts for this part and later ones."""
        self.facts.update(facts)
        self.write({"facts": facts})

    def guard(self, names: str | Sequence[str], measure: Callable[[], object]) -> None:
        """Run `measure`. If it raises, emit an error row for each of `names` that was not measured yet and continue, unless the
        device is broken: all that follows would fail without saying anything useful, so the process exits. It exits without
        error rows if a kernel failed that ran for the first time (`KernelFault`): another process, which does without this
        kernel, measures the same rows. Nothing is run if all of these rows are done.

        Afterwards torch's cached GPU memory is released, except between successful rows of an open engine: its steps would
        request all of it from the driver again, piece by piece, while they are timed."""
        failures, listed = self.failures, [names] if isinstance(names, str) else names
        if self.done.issuperset(listed):
            return
        try:
            measure()
        except KernelFault as error:
            log.exception("left to another process rows=%s", names)
            self.check_device(names, error)
        except Exception as error:
            self.failures += 1
            trace = "".join(traceback.format_exception(error))[-TRACE_CHARS_MAX:]
            for name in [name for name in listed if name not in self.measured] or [f"after {listed[-1]}"]:
                self.emit(Row(name=name, error=f"{type(error).__name__}: {str(error)[:300]}", note=trace))
            log.exception("failed rows=%s", names)
            self.check_device(names, error)
        if self.device.type == "cuda" and (not self.engines or self.failures > failures):
            gc.collect()  # engines have reference cycles, and the next one needs their memory
            torch.cuda.empty_cache()

    def check_device(self, names: str | Sequence[str], failed: Exception) -> None:
        """Raise `DeviceLost` if the device is broken behind an error of these rows."""
        if isinstance(failed, EngineBroken):  # by a kernel that does not end, it may be, which would be waited for
            raise DeviceLost(f"the device is broken since {names}: {failed}") from failed
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise DeviceLost(f"the device is broken since {names}: {str(error).splitlines()[0]}") from error
