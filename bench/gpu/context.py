"""The input of every measurement: the device, the sizes, figures of earlier parts, and where rows go."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gpu.rows import Row

WORDS_MAX = 1500

log = logging.getLogger("gatehouse.bench")


class FactMissing(RuntimeError):
    """The calibration did not give a figure that a limit is computed from."""


@dataclass(slots=True)
class Context:
    """One part under way. `facts` are figures of earlier parts and of this one: bandwidth and flops, tokens per second.
    `engines`: how many are open."""

    device: torch.device
    rehearsal: bool
    facts: dict[str, Any]
    write: Callable[[dict[str, Any]], None]
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    failures: int = field(default=0)
    engines: int = field(default=0)

    @property
    def dtype(self) -> torch.dtype:
        """What models compute with; the interpreter's bfloat16 is wrong."""
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
        """The same in fp8, or twice that of 16 bits. Raises `FactMissing`."""
        return self._fact("flops_fp8") if "flops_fp8" in self.facts else 2 * self.flops

    def _fact(self, name: str) -> float:
        if name not in self.facts:
            raise FactMissing(f"the calibration gave no {name}")
        return float(self.facts[name])

    @property
    def left_s(self) -> float:
        """Time until this part is ended from outside."""
        return self.deadline_s - self.clock()

    def size(self, real: int, rehearsed: int) -> int:
        return rehearsed if self.rehearsal else real

    def limit(self, row: Row, compute: Callable[[], float]) -> None:
        """Give a row its limit. Where the calibration lacks what it takes the row has none and says why: it was measured."""
        try:
            row.limit = compute()
        except FactMissing as missing:
            row.note = "; ".join(words for words in (f"no limit: {missing}", row.note) if words)

    def emit(self, row: Row) -> None:
        self.write({"row": row.as_dict()})

    def tell(self, **facts: Any) -> None:
        """Facts for this part and those after it."""
        self.facts.update(facts)
        self.write({"facts": facts})

    def guard(self, names: str | Sequence[str], measure: Callable[[], object]) -> None:
        """Measure; when that raises, the rows of these names say why and the part goes on. Unless the device is broken: then
        whatever follows would fail in ways that say nothing, and the part ends.

        What torch keeps of a GPU's memory is given back then, but between two rows of an engine that is open: its steps would
        ask the driver for all of it again, piece by piece, while they are timed."""
        failures = self.failures
        try:
            measure()
        except Exception as error:
            self.failures += 1
            words = "".join(traceback.format_exception(error))[-WORDS_MAX:]
            for name in [names] if isinstance(names, str) else names:
                self.emit(Row(name=name, error=f"{type(error).__name__}: {str(error)[:300]}", note=words))
            log.exception("failed rows=%s", names)
            self._check_device(names)
        if self.device.type == "cuda" and (not self.engines or self.failures > failures):
            gc.collect()  # engines have cycles, and the next one wants their memory
            torch.cuda.empty_cache()

    def _check_device(self, names: str | Sequence[str]) -> None:
        if self.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            raise SystemExit(f"the device is broken since {names}: {str(error).splitlines()[0]}") from error
