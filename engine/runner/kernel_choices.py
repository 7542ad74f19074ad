"""Which of several kernels serve an engine's decode steps of few rows: those that were fastest with its model on its card.

They are timed (`runner.kernel_timing`) by the first start, and kept in a file beside the compiled kernels, so that later starts
serve by the same kernels and give the same bits. The file's name is a digest of all that may change the decision: card, driver,
torch, compiler, sources of the kernels and of their timing, the model's shape and formats, and engine options. Deleting it has
kernels timed anew. Of two first starts at once, the first that has decided decides for both.

Only an engine whose steps are captured decides. One that runs steps in another way serves by what such an engine has decided,
so that both give the same tokens. Until there is a decision, and with GATEHOUSE_MEASURED_KERNELS=0, the oldest kernels serve,
which have run on a card: a kernel that has not runs for the first time while marks say so (`runner.kernel_trials`), and a
decision for it holds when the start has ended well. On a CPU and in batch-invariant engines there are no choices.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from engine.device import DRIVER, device_name
from engine.protocol import KernelChoice
from engine.runner import kernel_timing
from engine.runner.cuda_graphs import CaptureFailed
from engine.runner.kernel_timing import KernelTiming
from engine.runner.kernel_trials import KernelTrials, TrialsImpossible
from engine.switches import GRAPHS, switched_off
from kernels import ops

log = logging.getLogger("gatehouse.engine")

FOLDER = "gatehouse-kernel-choices"
"""In Triton's folder for compiled kernels."""


class KernelChoices:
    """The decisions for one engine; puts them in force for the process."""

    def __init__(self, path: Path | None, trials: KernelTrials | None = None, *, decides: bool = True) -> None:
        """`path`: the file of the decisions. None: the engine has no choices. `trials`: None, or those of the same engine.
        `decides`: whether the engine can."""
        self._path, self._trials = path, trials
        self._decides = decides
        self._are_stored = False
        self.chosen: list[KernelChoice] = []
        if path is not None:
            self._read(path)
        self._put_in_force()

    @classmethod
    def of(cls, device: torch.device, facts: Mapping[str, object], *, decides: bool = True) -> KernelChoices:
        """Those of an engine with these facts, on a GPU."""
        cache = ops.kernel_cache()
        card = {
            "card": device_name(device),
            "driver": DRIVER.read_text("utf-8") if DRIVER.exists() else "",
            "torch": torch.__version__,
            "kernels": cache.revision,
            "switched_off": [name for name in switched_off() if name != GRAPHS],
        }
        start = _digest({**facts, **card, "timing": Path(kernel_timing.__file__).read_text("utf-8")})
        folder = cache.folder / FOLDER
        trials = KernelTrials(folder / f"trials-{_digest(card)}", start, device)
        return cls(folder / f"{start}.json", trials, decides=decides)

    @classmethod
    def oldest(cls) -> KernelChoices:
        """No decisions, and the oldest alternatives in force."""
        choices = cls(None)
        ops.put_in_force(ops.oldest_alternatives())
        return choices

    @property
    def needs_timing(self) -> bool:
        return self._path is not None and self._decides and not self._are_stored

    def first_use(self) -> AbstractContextManager[None]:
        """As `KernelTrials.first_use`: surrounds the decision, and all that a start runs by it."""
        return nullcontext() if self._trials is None else self._trials.first_use()

    def decide(self, timing: KernelTiming) -> None:
        """Time the alternatives and store the decisions, or take those that another start has stored meanwhile; put them in
        force. If a capture fails, memory is short or marks cannot be written, the oldest alternatives serve, and the next start
        tries again. Raises `KernelFault`."""
        assert self._path is not None, "nothing is to be timed"
        assert self._trials is not None, "what is timed runs for the first time"
        try:
            self.chosen = timing.run(self._trials)
        except (CaptureFailed, torch.OutOfMemoryError, TrialsImpossible) as error:
            log.error("%s: the oldest kernels serve", error)
            self._trials.serve()
        else:
            self._store(self._path)
            if self._are_stored:  # by another start, which has marks for what serves
                self._trials.serve()
        self._put_in_force()

    def note_failure(self, error: Exception) -> None:
        """Called with an error that ends an engine in service: if the device has failed, what was chosen is marked."""
        if self._trials is not None:
            choices = {choice.name: choice for choice in ops.CHOICES}
            self._trials.record_service_fault([(choices[each.name], each.serves) for each in self.chosen], error)

    @property
    def are_oldest(self) -> bool:
        """Whether the oldest alternatives serve."""
        oldest = ops.oldest_alternatives()
        return all(each.serves == oldest[each.name] for each in self.chosen)

    def listed(self) -> str:
        """For the log: `8-bit products of one row: GEMV (Hopper kernel 2210.0 µs, GEMV 2105.5 µs, tiles refused); …`"""
        return "; ".join(f"{each.name}: {each.serves} ({_figures(each)})" for each in self.chosen)

    def described(self) -> str:
        """What serves instead of defaults, for the description of an engine: `8-bit products of one row by GEMV`; or empty."""
        return ", ".join(
            f"{each.name} by {each.serves}"
            + (f" ({'; '.join(f'{name} refused: {why}' for name, why in each.refused.items())})" if each.refused else "")
            for each in self.chosen
            if not _is_default(each)
        )

    def log_decisions(self) -> None:
        """Log what serves and why, and repeat what was refused."""
        if self.chosen:
            log.info("kernels chosen=%s %s", "earlier" if self._are_stored else "now", self.listed())
        for each in self.chosen if self._are_stored else ():
            for name, why in each.refused.items():
                log.error("%s by %s does not serve since an earlier start: %s", each.name, name, why)

    def _put_in_force(self) -> None:
        oldest = {} if self._path is None else ops.oldest_alternatives()
        ops.put_in_force(oldest | {each.name: each.serves for each in self.chosen})

    def _read(self, path: Path) -> None:
        """Take over what is stored, if it is whole and the start that decided it has not been ended by it."""
        choices = {choice.name: choice for choice in ops.CHOICES}
        try:
            found = _decoded(path.read_bytes())
            for each in found:
                if each.name not in choices or each.serves not in choices[each.name].alternatives or not each.us:
                    raise ValueError(f"it has no decision on {each.name} that this version knows")
                if self._trials is not None and self._trials.has_left((choices[each.name], each.serves)):
                    raise ValueError(f"the engine ended while {each.name} was served by {each.serves}")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            log.warning("kernels are timed anew: %s is not used: %s", path, error)
            if self._decides:
                with suppress(OSError):  # where it cannot be deleted, a new one cannot be written either
                    path.unlink()
            return
        self.chosen, self._are_stored = found, True

    def _store(self, path: Path) -> None:
        """Whole or not at all, and only if no other start has done so, as far as the file system can tell."""
        unfinished = path.with_suffix(f".{secrets.token_hex(8)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_bytes(json.dumps([asdict(each) for each in self.chosen]).encode())
            try:
                os.link(unfinished, path)
            except FileExistsError:
                self._read(path)
            except OSError:  # the file system may have no links
                unfinished.replace(path)
        except OSError as error:
            log.warning("the next start times kernels again: %s cannot be written: %s", path, error)
        finally:
            with suppress(OSError):
                unfinished.unlink()


def _digest(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _decoded(content: bytes) -> list[KernelChoice]:
    """Stored decisions. Raises ValueError for anything else."""
    try:
        found = [KernelChoice(**each) for each in json.loads(content)]
        texts = [text for each in found for text in (each.name, each.serves, *each.refused.values())]
        times_us = [us for each in found for us in each.us.values()]
    except (TypeError, AttributeError) as error:
        raise ValueError(f"it holds no decisions: {error}") from error
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(us, int | float) for us in times_us):
        raise ValueError("it holds no decisions: of another type")
    return found


def _is_default(choice: KernelChoice) -> bool:
    return not choice.refused and choice.serves == next(iter(choice.us))


def _figures(choice: KernelChoice) -> str:
    figures = [f"{name} {us:.1f} µs" for name, us in choice.us.items()]
    return ", ".join([*figures, *(f"{name} refused" for name in choice.refused)])
