"""Which of several kernels serve an engine's decode steps of few rows: those that were fastest with its model on its card.

They are timed (`runner.kernel_timing`) by the first start, and kept in a file beside the compiled kernels, so that later starts
serve by the same kernels and give the same bits. The file's name is a digest of all that may change the decision: card, driver,
torch, compiler, sources of the kernels and of their timing, the model's shape and formats, and engine options. Deleting it has
kernels timed anew.

Only an engine whose steps are captured decides. One that runs steps in another way serves by what such an engine has decided,
so that both give the same tokens. On a CPU, in batch-invariant engines, which have their own kernels, and with
GATEHOUSE_MEASURED_KERNELS=0 the defaults serve.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from engine.device import DRIVER, device_name
from engine.protocol import KernelChoice
from engine.runner import kernel_timing
from engine.runner.cuda_graphs import CaptureFailed
from engine.runner.kernel_timing import KernelTiming
from engine.switches import GRAPHS, switched_off
from kernels import ops

log = logging.getLogger("gatehouse.engine")

FOLDER = "gatehouse-kernel-choices"
"""In Triton's folder for compiled kernels."""


class KernelChoices:
    """The decisions for one engine; puts them in force for the process."""

    def __init__(self, path: Path | None, *, decides: bool = True) -> None:
        """`path`: the file of the decisions. None: there are none, the defaults serve. `decides`: whether the engine can."""
        self._path = path
        self._decides = decides
        self._are_stored = False
        self.chosen: list[KernelChoice] = []
        if path is not None:
            self._read(path)
        ops.put_in_force({each.name: each.serves for each in self.chosen})

    @classmethod
    def of(cls, device: torch.device, facts: Mapping[str, object], *, decides: bool = True) -> KernelChoices:
        """Those of an engine with these facts, on a GPU."""
        cache = ops.kernel_cache()
        facts = {
            **facts,
            "card": device_name(device),
            "driver": DRIVER.read_text("utf-8") if DRIVER.exists() else "",
            "torch": torch.__version__,
            "kernels": cache.revision,
            "timing": Path(kernel_timing.__file__).read_text("utf-8"),
            "switched_off": [name for name in switched_off() if name != GRAPHS],
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return cls(cache.folder / FOLDER / f"{digest[:32]}.json", decides=decides)

    @property
    def needs_timing(self) -> bool:
        return self._path is not None and self._decides and not self._are_stored

    def decide(self, timing: KernelTiming) -> None:
        """Time the alternatives, put the fastest in force and store the decisions. If a capture fails or memory is short, the
        defaults serve, and the next start tries again."""
        assert self._path is not None, "nothing is to be timed"
        try:
            self.chosen = timing.run()
        except (CaptureFailed, torch.OutOfMemoryError) as error:
            log.error("%s: the default kernels serve", error)
            ops.put_in_force({})
            return
        self._write(self._path)

    @property
    def are_defaults(self) -> bool:
        return all(map(_is_default, self.chosen))

    def listed(self) -> str:
        """For the log: `8-bit products of one row: GEMV (Hopper kernel 2210.0 µs, GEMV 2105.5 µs, tiles refused); …`"""
        return "; ".join(f"{each.name}: {each.serves} ({_figures(each)})" for each in self.chosen)

    def described(self) -> str:
        """What serves instead of defaults, for the description of an engine: `8-bit products of one row by GEMV`; or empty."""
        return ", ".join(
            f"{each.name} by {each.serves}" + (f" ({', '.join(each.refused)} refused: wrong results)" if each.refused else "")
            for each in self.chosen
            if not _is_default(each)
        )

    def log_decisions(self) -> None:
        """Log what serves and why, and repeat what was refused."""
        if self.chosen:
            log.info("kernels chosen=%s %s", "earlier" if self._are_stored else "now", self.listed())
        for each in self.chosen if self._are_stored else ():
            for refused in each.refused:
                log.error("%s by %s: wrong results on this GPU at an earlier start, it does not serve", each.name, refused)

    def _read(self, path: Path) -> None:
        try:
            found = msgspec.json.decode(path.read_bytes(), type=list[KernelChoice])
            alternatives = {choice.name: choice.alternatives for choice in ops.CHOICES}
            unknown = [each.name for each in found if each.serves not in alternatives.get(each.name, ()) or not each.us]
            if unknown:
                raise ValueError(f"it has no decision on {unknown[0]} that this version knows")
        except FileNotFoundError:
            return
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("kernels are timed anew: %s cannot be read: %s", path, error)
            return
        self.chosen, self._are_stored = found, True

    def _write(self, path: Path) -> None:
        """Whole or not at all, beside starts of other engines."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(msgspec.json.encode(self.chosen))
            unfinished.replace(path)
        except OSError as error:
            log.warning("the next start times kernels again: %s cannot be written: %s", path, error)


def _is_default(choice: KernelChoice) -> bool:
    return not choice.refused and choice.serves == next(iter(choice.us))


def _figures(choice: KernelChoice) -> str:
    figures = [f"{name} {us:.1f} µs" for name, us in choice.us.items()]
    return ", ".join([*figures, *(f"{name} refused" for name in choice.refused)])
