"""The parts of a run, in order: what each measures, how long it may take, and which run side by side. Standard library only.

    calibrate → checks, with every kernel of the engines compiled meanwhile → kernels → engines → peers

Checks are not timed, so several processes share the card and the compiler has all cores. Everything after them runs alone.
A check compiles one variant of a kernel after the other, some 35 to 50 a process at up to a second each, so those of attention
and of products are two processes each; what warms up uses all cores and gives way to them.

The first part's time begins when it has imported; the others import while the stage before them measures.
A part has two times, both for a cold cache of kernels. `usual_s` is kept for it whatever the parts before it do: all of a
run's together fit its time, so that none is left out because another was slow. `limit_s` is the most it gets while there is
time left; those of each of `CALLS` fit too. Both follow a run on an H200, with a third more. There 32k tokens among 64 decoders
had not come 20 s behind their arrival, and `transformers` had done 97 of 128 conversations in what was left of 61 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TOTAL_S = 470.0
"""Of the whole command; eight minutes including start and output."""


@dataclass(frozen=True, slots=True)
class Part:
    """`target` is the part of the targets whose rows it gives. A run does the parts of a `family` in processes of their own,
    one after the other, or at a time where they are `beside` each other; a rehearsal does those of a family in one process,
    and those of all families behind the checks. `needs` names parts that come with it: without its warm-up it would compile
    while it measures. One that is `asked_for` is left out unless it is named."""

    name: str
    target: str
    module: str
    function: str
    usual_s: float
    limit_s: float
    family: str
    beside: bool = False
    needs: tuple[str, ...] = ()
    asked_for: bool = False


LLAMA, SMALL, FORMATS = ("warm llama",), ("warm small",), ("warm 8 bits", "warm 4 bits")
PARTS: tuple[Part, ...] = (
    Part("calibrate", "calibrate", "bench.gpu.calibration", "calibrate", 10, 20, "calibrate"),
    Part("check attention", "checks", "bench.gpu.check_attention", "check", 55, 120, "checks", beside=True),
    Part("check prefill", "checks", "bench.gpu.check_attention", "check_prefill", 55, 120, "checks", beside=True),
    Part("check rows", "checks", "bench.gpu.check_rows", "check", 55, 120, "checks", beside=True),
    Part("check products", "checks", "bench.gpu.check_products", "check", 55, 120, "checks", beside=True),
    Part("check fused products", "checks", "bench.gpu.check_products", "check_fused", 55, 120, "checks", beside=True),
    Part("check sampling", "checks", "bench.gpu.check_sampling", "check", 55, 120, "checks", beside=True),
    Part("check tokens", "checks", "bench.gpu.same_tokens", "check", 55, 120, "checks", beside=True),
    Part("check engine", "invariant", "bench.gpu.warm_up", "invariant", 55, 120, "checks", beside=True),
    Part("warm llama", "warm-up", "bench.gpu.warm_up", "warm_llama", 55, 60, "checks", beside=True),
    Part("warm small", "warm-up", "bench.gpu.warm_up", "warm_small", 55, 60, "checks", beside=True),
    Part("warm 8 bits", "warm-up", "bench.gpu.warm_up", "warm_8_bits", 55, 60, "checks", beside=True),
    Part("warm 4 bits", "warm-up", "bench.gpu.warm_up", "warm_4_bits", 55, 60, "checks", beside=True),
    Part("warm in turn", "warm-up", "bench.gpu.warm_up", "warm_in_turn", 55, 60, "checks", beside=True),
    Part("kernel attention", "kernels", "bench.gpu.speed_attention", "measure", 15, 75, "kernels"),
    Part("kernel products", "kernels", "bench.gpu.speed_products", "measure", 22, 65, "kernels"),
    Part("kernel rows", "kernels", "bench.gpu.speed_rows", "measure", 8, 45, "kernels"),
    Part("llama 8b", "llama 8b", "bench.gpu.serve", "llama_8b", 58, 70, "engines", needs=(*LLAMA, "warm in turn")),
    Part("small models", "small models", "bench.gpu.serve", "small_models", 22, 30, "engines", needs=SMALL),
    Part("formats", "formats", "bench.gpu.serve", "formats", 42, 45, "engines", needs=FORMATS),
    Part("latency", "latency", "bench.gpu.serve_latency", "latency", 75, 85, "engines", needs=LLAMA),
    Part("saturated", "saturated", "bench.gpu.serve", "saturated", 44, 50, "engines", needs=LLAMA),
    Part("peers", "peers", "bench.gpu.peers", "against_transformers", 105, 110, "peers", needs=("llama 8b",)),
    Part("choices", "choices", "bench.gpu.choices", "measure", 60, 100, "choices", asked_for=True),
)
CALLS = (
    ("checks", "invariant", "kernels", "choices"),
    ("llama 8b", "small models", "formats", "latency", "saturated", "peers"),
)
"""All parts in two commands, for use of a card for longer: each has time for the limits of all its parts."""
BY_NAME = {part.name: part for part in PARTS}


@dataclass(frozen=True, slots=True)
class Job:
    """The parts that one process computes, one after the other."""

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
"""Jobs that run at a time."""


def usual_s(stages: Sequence[Stage]) -> float:
    """What these stages usually take, one after the other."""
    return sum(max(job.usual_s for job in stage) for stage in stages)


def share_s(stages: Sequence[Stage], left_s: float) -> float:
    """How long the first of these stages may take when so much is left: all but what the others usually take, and no less than
    what it takes itself."""
    return min(left_s, max(left_s - usual_s(stages[1:]), usual_s(stages[:1])))


def stages(only: set[str] | None = None, *, rehearse: bool = False) -> list[list[Job]]:
    """The stages of a run. `only` names targets' parts; what calibrates is always there, and what the chosen need."""
    chosen = _chosen(only, rehearse=rehearse)
    found: list[list[Job]] = []
    for part in chosen:
        before = found[-1][0].parts[0].family if found else None
        if rehearse and before is not None and (before == part.family or before not in ("calibrate", "checks")):
            found[-1] = [Job((*found[-1][0].parts, part))]
        elif before == part.family and part.beside:
            found[-1].append(Job((part,)))
        else:
            found.append([Job((part,))])
    return found


def _chosen(only: set[str] | None, *, rehearse: bool) -> list[Part]:
    """In the order of the plan. A rehearsal has everything."""
    wanted = {part.name for part in PARTS if (rehearse or not part.asked_for if only is None else part.target in only)}
    for part in reversed(PARTS):  # what is needed comes before
        if part.name in wanted:
            wanted |= set(part.needs)
    return [part for part in PARTS if part.target == "calibrate" or part.name in wanted]
