"""The parts of a run, in order: what each measures, how long it may take, and which run concurrently. Standard library only.

    calibrate → checks, with every kernel of the engines compiled meanwhile → kernels → engines → peers

Checks are not timed, so several processes share the card and the compiler has all cores. Everything after them runs alone.
A check compiles its kernel variants one after another, about 35 to 50 per process at up to a second each, so the checks of
attention and of products take two processes each. Warm-up parts use all cores and yield to the checks. The check of tokens
ends with six engines of quantised weights, whose kernels the warm-ups compile, except for four per format: some 15 s, after 35.

The first part's time begins when its imports are done; the others import while the stage before them measures.
A part has two times, both for a cold kernel cache. `usual_s` is reserved for it however long earlier parts take: the sum fits
the time of a run, so that no part is skipped because another was slow. `limit_s` is its maximum if time is left; the limits
within each of `COMMANDS` fit too. Both come from a run on an H200, plus a third. In that run 32k tokens among 64 decoders had
not finished 20 s after their arrival, and `transformers` had done 97 of 128 conversations in what was left of 61 s. Warm-ups
took 38 s and have a fifth more kernels to compile since; a start of an engine captures 20 to 29 steps with chunks and times
kernels since, some 4 s for 32 layers on that machine's processor, where a captured step took 50 to 100 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOTAL_S = 470.0
"""Seconds for the whole command; with start and output, eight minutes."""


@dataclass(frozen=True, slots=True)
class Part:
    """`target`: the part of `bench.gpu.targets` whose rows it emits. A run executes each part of a `family` in its own process,
    one after another, or at the same time if they are `concurrent`; a rehearsal executes a family in one process, and
    the families after the checks in one process as well. `needs`: parts that are run with it, because without its warm-up it
    would compile while it measures. `on_request`: runs only when named."""

    name: str
    target: str
    module: str
    function: str
    usual_s: float
    limit_s: float
    family: str
    concurrent: bool = False
    needs: tuple[str, ...] = ()
    on_request: bool = False


LLAMA, SMALL, FORMATS = ("warm llama",), ("warm small",), ("warm 8 bits", "warm 4 bits")
PARTS: tuple[Part, ...] = (
    Part("calibrate", "calibrate", "bench.gpu.calibration", "calibrate", 10, 15, "calibrate"),
    Part("check attention", "checks", "bench.gpu.check_attention", "check", 60, 120, "checks", concurrent=True),
    Part("check prefill", "checks", "bench.gpu.check_attention", "check_prefill", 60, 120, "checks", concurrent=True),
    Part("check rows", "checks", "bench.gpu.check_rows", "check", 60, 120, "checks", concurrent=True),
    Part("check products", "checks", "bench.gpu.check_products", "check", 60, 120, "checks", concurrent=True),
    Part("check fused products", "checks", "bench.gpu.check_products", "check_fused", 60, 120, "checks", concurrent=True),
    Part("check sampling", "checks", "bench.gpu.check_sampling", "check", 60, 120, "checks", concurrent=True),
    Part("check tokens", "checks", "bench.gpu.same_tokens", "check", 60, 120, "checks", concurrent=True),
    Part("check engine", "invariant", "bench.gpu.warm_up", "invariant", 60, 120, "checks", concurrent=True),
    Part("warm llama", "warm-up", "bench.gpu.warm_up", "warm_llama", 60, 70, "checks", concurrent=True),
    Part("warm small", "warm-up", "bench.gpu.warm_up", "warm_small", 60, 70, "checks", concurrent=True),
    Part("warm 8 bits", "warm-up", "bench.gpu.warm_up", "warm_8_bits", 60, 70, "checks", concurrent=True),
    Part("warm 4 bits", "warm-up", "bench.gpu.warm_up", "warm_4_bits", 60, 70, "checks", concurrent=True),
    Part("warm in turn", "warm-up", "bench.gpu.warm_up", "warm_serially", 60, 70, "checks", concurrent=True),
    Part("kernel attention", "kernels", "bench.gpu.speed_attention", "measure", 15, 75, "kernels"),
    Part("kernel products", "kernels", "bench.gpu.speed_products", "measure", 22, 65, "kernels"),
    Part("kernel rows", "kernels", "bench.gpu.speed_rows", "measure", 8, 45, "kernels"),
    Part("llama 8b", "llama 8b", "bench.gpu.serve", "llama_8b", 58, 70, "engines", needs=(*LLAMA, "warm in turn")),
    Part("small models", "small models", "bench.gpu.serve", "small_models", 25, 32, "engines", needs=SMALL),
    Part("formats", "formats", "bench.gpu.serve", "formats", 50, 58, "engines", needs=FORMATS),
    Part("latency", "latency", "bench.gpu.serve_latency", "latency", 55, 62, "engines", needs=LLAMA),
    Part("saturated", "saturated", "bench.gpu.serve", "saturated", 46, 50, "engines", needs=LLAMA),
    Part("peers", "peers", "bench.gpu.peers", "against_transformers", 105, 110, "peers", needs=("llama 8b",)),
    Part("choices", "choices", "bench.gpu.choices", "measure", 110, 140, "choices", on_request=True),
)
COMMANDS = (
    ("checks", "invariant", "kernels", "choices"),
    ("llama 8b", "small models", "formats", "latency", "saturated", "peers"),
)
"""All parts in two commands, for when a card is available for longer: each has time for the limits of all its parts."""
BY_NAME = {part.name: part for part in PARTS}


@dataclass(frozen=True, slots=True)
class Job:
    """The parts that one process runs, one after the other."""

    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)

    @property
    def usual_s(self) -> float:
        return sum(part.usual_s for part in self.parts)

    @property
    def limit_s(self) -> float:
        return sum(part.limit_s for part in self.parts)


Stage = Sequence[Job]
"""Jobs that run at the same time."""


def usual_s(stages: Sequence[Stage]) -> float:
    """The usual total time of these stages."""
    return sum(max(job.usual_s for job in stage) for stage in stages)


def allotted_s(stages: Sequence[Stage], left_s: float) -> float:
    """How long the first of these stages may take when `left_s` seconds are left: the time that the others do not usually take,
    and at least its own usual time."""
    return min(left_s, max(left_s - usual_s(stages[1:]), usual_s(stages[:1])))


def stages(only: set[str] | None = None, *, rehearse: bool = False) -> list[list[Job]]:
    """The stages of a run. `only`: parts of the targets. The calibration and what the chosen parts need are always included."""
    found: list[list[Job]] = []
    for part in _selected(only, rehearse=rehearse):
        family = found[-1][0].parts[0].family if found else None
        is_after_checks = family not in (None, "calibrate", "checks")
        if rehearse and (family == part.family or is_after_checks):
            found[-1] = [Job((*found[-1][0].parts, part))]
        elif family == part.family and part.concurrent:
            found[-1].append(Job((part,)))
        else:
            found.append([Job((part,))])
    return found


def _selected(only: set[str] | None, *, rehearse: bool) -> list[Part]:
    """The parts to run, in the order of the plan. Without `only`, a rehearsal runs all of them."""

    def is_chosen(part: Part) -> bool:
        if only is not None:
            return part.target in only
        return rehearse or not part.on_request

    names = {part.name for part in PARTS if is_chosen(part)}
    for part in reversed(PARTS):  # needed parts come earlier
        if part.name in names:
            names |= set(part.needs)
    return [part for part in PARTS if part.target == "calibrate" or part.name in names]
