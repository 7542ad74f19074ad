"""What every measurement gets: the device, the sizes, what earlier parts found out, and where rows go."""

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
        """Bytes per second of the calibrating copy, read and written."""
        return float(self.facts["bandwidth"])

    @property
    def flops(self) -> float:
        return float(self.facts["flops"])

    @property
    def left_s(self) -> float:
        """Until this part is ended from outside."""
        return self.deadline_s - self.clock()

    def size(self, real: int, rehearsed: int) -> int:
        return rehearsed if self.rehearsal else real

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
