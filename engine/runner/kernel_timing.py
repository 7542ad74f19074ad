"""Times kernels that can replace each other (`kernels.alternatives`) with the decode steps of a loaded model.

For each choice that the model's layers ask for, the decode step is captured with each alternative, as far as its logits, over
requests with long contexts. The graphs are replayed in turn, so that clock and temperature are the same for all, and medians
are compared. First the logits are: an alternative that disagrees with the oldest one is refused, as is one that cannot run or
has ended an earlier start (`kernel_trials`). These logits are of a step that follows one of other tokens. Otherwise a kernel
that reads before the preceding one has written would find the right values, left by the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from engine.config.pooling import PoolingConfig
from engine.protocol import KernelChoice
from engine.runner.embedder import Embedder
from engine.runner.kernel_trials import KernelFault, KernelTrials, TrialsImpossible, first_line, wait_for
from engine.runner.slot_steps import SlotSteps
from engine.runner.slots import SlotWrites
from engine.runner.token_spans import TokenSpan
from kernels import ops

log = logging.getLogger("gatehouse.engine")

CONTEXT_TOKENS = 2048
"""Tokens of all contexts of a timed step together: as long as a chat, and read by one pass of the model."""

STRIDE = 7919
"""Between two tokens of a context, and between the last tokens of two steps, a prime: they are as good as random."""

ROUNDS_MIN, ROUNDS_MAX = 3, 7
ROUNDS_MAX_S = 0.15
"""How often all alternatives of a choice are replayed: as often as fits into this time, within the limits. One round before
these is not counted."""

MARGIN = 0.02
"""By how much of a step an alternative must be faster to replace the default: several times what medians differ by chance."""

TOLERANCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}
"""The greatest distance of logits from those of the oldest alternative, as a share of their own spread. Rounding in another
order adds up over the layers to a few percent of it; what a wrong kernel computes is about as far away as other logits are."""

EXPERTS_TOLERANCE = 0.5
"""That of mixtures of experts: where two experts are nearly tied, rounding has another one chosen, whose output is as different
as any, and in later layers more of them. Random models of 32 layers that choose 2 of 8 experts came to 0.3."""


class KernelTiming:
    """The timing for one engine. Needs nothing to be in flight, and leaves slots and cache with content of no request."""

    def __init__(self, steps: SlotSteps) -> None:
        self._steps = steps
        self._alternatives: dict[ops.Choice, list[str]] = {}
        self._contexts = SlotWrites()
        """Slots with contexts, their last tokens and lengths."""

    def compile(self) -> None:
        """Within `compiling`, with the oldest alternatives in force: find the choices that the model's layers ask for, and
        request the kernels of the other alternatives."""
        if self._steps.limits.max_model_len < 2:
            return  # no request has a context
        for num_rows in dict.fromkeys(map(self._num_rows, ops.CHOICES)):
            with ops.consulted() as found:
                self._launch(num_rows)
            for choice, supported in found.items():
                if self._num_rows(choice) == num_rows and len(supported) > 1:
                    self._alternatives[choice] = [each for each in choice.alternatives if each in supported]
        for choice, alternatives in self._alternatives.items():
            for alternative in alternatives[:-1]:
                with ops.alternative_in_force(choice, alternative):
                    self._launch(self._num_rows(choice))
                    self._embed(self._num_rows(choice))

    @torch.inference_mode()
    def run(self, trials: KernelTrials) -> list[KernelChoice]:
        """Decide, put the decisions in force, and have `trials` mark what serves. Raises `CaptureFailed`, `KernelFault` and
        `TrialsImpossible`."""
        chosen: dict[ops.Choice, KernelChoice] = {}
        with self._steps.calls.fresh_graphs():
            for choice in ops.CHOICES:
                if choice in self._alternatives:
                    chosen[choice] = self._choose(choice, trials)
                    ops.put_in_force(ops.oldest_alternatives() | {each.name: each.serves for each in chosen.values()})
                    trials.serve(*((choice, each.serves) for choice, each in chosen.items()))
        return [*chosen.values()]

    def _num_rows(self, choice: ops.Choice) -> int:
        """As many as there are seats, and two blocks for each."""
        return min(choice.num_rows, self._steps.limits.max_num_seqs, max(1, self._num_blocks // 2))

    @property
    def _num_blocks(self) -> int:
        return self._steps.target.kv_caches[0].shape[0]

    def _launch(self, num_rows: int) -> None:
        """A step without requests, and the passes of as many decodes that are made without slots."""
        self._steps.inputs.write_slots([], num_rows)
        self._steps.decodes.step(num_rows, None)
        for decoder in self._steps.decoders:
            decoder.forward_spans([TokenSpan((0,), 0, (row,), (0,)) for row in range(num_rows)])

    def _embed(self, num_tokens: int) -> None:
        """A text, whose layers are not fused."""
        limits = self._steps.limits
        length = min(num_tokens, limits.max_model_len, limits.max_num_batched_tokens)
        Embedder(self._steps.target.text_model, PoolingConfig(mode="last")).embed([[0] * length])

    def _choose(self, choice: ops.Choice, trials: KernelTrials) -> KernelChoice:
        alternatives, num_rows = self._alternatives[choice], self._num_rows(choice)
        refused = {name: why for name, why in trials.refusals(choice).items() if name in alternatives}
        self._fill_contexts(num_rows)
        target = self._steps.target
        replays: dict[str, Callable[[], None]] = {}
        logits: dict[str, torch.Tensor] = {}
        for running in [each for each in alternatives if each not in refused]:
            try:
                with trials.running((choice, running)), ops.alternative_in_force(choice, running):
                    replays[running] = self._captured((choice.name, running), num_rows)
                    self._replay_after_other_tokens(replays[running])
            except (KernelFault, TrialsImpossible):
                raise
            except Exception as error:
                if running == choice.oldest or isinstance(error.__cause__ or error, torch.OutOfMemoryError):
                    log.error("%s by %s cannot be timed: %s", choice.name, running, error)
                    raise
                replays.pop(running, None)
                refused[running] = f"it cannot run: {type(error).__name__}: {first_line(error)}"
                continue
            logits[running] = self._steps.decodes.step.logits(num_rows).to("cpu", torch.float32, copy=True)
        for name in wrong_results(logits, tolerance(target.dtype, has_experts=target.has_experts)):
            refused[name] = "wrong results"
        for name, why in refused.items():
            log.error("%s by %s does not serve: %s", choice.name, name, why)
        right = [name for name in replays if name not in refused] or alternatives[-1:]
        with trials.running(*((choice, name) for name in right)):
            times_s = interleaved_s({name: replays[name] for name in right})
        us = {name: round(1e6 * time_s, 1) for name, time_s in times_s.items()}
        return KernelChoice(name=choice.name, serves=fastest(times_s), us=us, refused=refused)

    def _captured(self, key: tuple[str, str], num_rows: int) -> Callable[[], None]:
        """Capture a step that has been seen to end: what follows might wait for it without a limit."""
        calls, step = self._steps.calls, partial(self._steps.decodes.step, num_rows, None)
        step()
        wait_for(self._steps.device)
        calls.make_ready(key, step, is_kept=True)
        return partial(calls.run, key, step)

    def _replay_after_other_tokens(self, replay: Callable[[], None]) -> None:
        """Decode other tokens after the contexts, then theirs."""
        contexts, vocab_size = self._contexts, self._steps.target.vocab_size
        others = [(token_id + STRIDE) % vocab_size for token_id in contexts.last_tokens]
        for writes in (replace(contexts, last_tokens=others), contexts):
            self._steps.state.write(writes)
            replay()

    def _fill_contexts(self, num_rows: int) -> None:
        """Have slots 0 … `num_rows` - 1 hold requests whose contexts the models have read, and a step decode them."""
        if num_rows == len(self._contexts.slots):
            return
        steps, limits = self._steps, self._steps.limits
        num_blocks = min(self._num_blocks // num_rows, limits.max_blocks)
        length = min(
            CONTEXT_TOKENS // num_rows,
            limits.max_num_batched_tokens // num_rows,
            limits.max_model_len - 1,
            num_blocks * limits.block_size - 1,
        )
        rows, used_blocks, vocab_size = range(num_rows), length // limits.block_size + 1, steps.target.vocab_size
        spans = [
            TokenSpan(
                [(row + STRIDE * position) % vocab_size for position in range(length)],
                0,
                range(row * num_blocks, row * num_blocks + used_blocks),
                (length - 1,),
            )
            for row in rows
        ]
        for decoder in steps.decoders:
            decoder.forward_spans(spans)
        self._contexts = SlotWrites(
            slots=[*rows], last_tokens=[span.token_ids[-1] for span in spans], num_tokens=[length + 1 for _ in rows]
        )
        blocks = [(row, 0, span.block_table) for row, span in zip(rows, spans, strict=True)]
        steps.state.write(replace(self._contexts, blocks=blocks))
        steps.inputs.write_slots([*rows], num_rows)


def tolerance(dtype: torch.dtype, *, has_experts: bool) -> float:
    """The tolerance of a model that computes in `dtype`. `has_experts`: of a mixture of experts"""
    return max(TOLERANCE[dtype], EXPERTS_TOLERANCE) if has_experts else TOLERANCE[dtype]


def wrong_results(logits: Mapping[str, torch.Tensor], tolerance: float) -> list[str]:
    """The alternatives whose logits, [R, V] float32, are not all finite or further from those of the last finite one than
    `tolerance`, as a share of the spread of these. All, if none is finite."""
    finite = {name: each for name, each in logits.items() if bool(each.isfinite().all())}
    if not finite:
        return [*logits]
    expected = [*finite.values()][-1]
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    return [name for name in logits if name not in finite or bool((finite[name] - expected).norm() > tolerance * spread)]


def fastest(times_s: Mapping[str, float]) -> str:
    """The fastest alternative, or the first one if that is faster by less than MARGIN."""
    first, best = next(iter(times_s)), min(times_s, key=times_s.__getitem__)
    return best if times_s[best] < (1 - MARGIN) * times_s[first] else first


def interleaved_s(replays: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """The median seconds of each replay on the device, one after another in each round."""
    runs = [*replays.values()]
    [first] = _rounds_s(runs, 1)
    num_rounds = max(ROUNDS_MIN, min(ROUNDS_MAX, int(ROUNDS_MAX_S / max(sum(first), 1e-6))))
    rounds = _rounds_s(runs, num_rounds)
    return {name: median(times_s) for name, times_s in zip(replays, zip(*rounds, strict=True), strict=True)}


def _rounds_s(runs: Sequence[Callable[[], None]], num_rounds: int) -> list[list[float]]:
    """Seconds of each run, by round. All are launched before the host waits, so that the device does not."""
    rounds = []
    for _ in range(num_rounds):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(runs) + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for run, event in zip(runs, events[1:], strict=True):
            run()
            event.record()
        rounds.append(events)
    rounds[-1][-1].synchronize()
    return [[begin.elapsed_time(end) / 1000 for begin, end in pairwise(events)] for events in rounds]
