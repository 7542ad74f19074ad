"""The parts of a run, in order: what each measures, how long it may take, and which run side by side. Standard library only.

    calibrate → checks, with every kernel of the engines compiled meanwhile → kernels → engines → peers → choices

Checks are not timed, so several processes share the card and the compiler has all cores. Everything after them runs alone.
Limits are for a cold cache of kernels; the usual sum is less, and no part begins that the rest of the time cannot hold.
"""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 470.0
"""Of the whole command; eight minutes with what starting and writing takes."""


@dataclass(frozen=True, slots=True)
class Part:
    """`target` is the part of the targets whose rows it gives. A rehearsal computes a `family` in one process; a run does its
    parts in processes of their own, one after the other, or at a time where they are `beside` each other."""

    name: str
    target: str
    module: str
    function: str
    limit_s: float
    family: str
    beside: bool = False


PARTS: tuple[Part, ...] = (
    Part("calibrate", "calibrate", "bench.gpu.calibration", "calibrate", 40, "calibrate"),
    Part("check attention", "checks", "bench.gpu.check_attention", "check", 100, "checks", beside=True),
    Part("check rows", "checks", "bench.gpu.check_rows", "check", 100, "checks", beside=True),
    Part("check products", "checks", "bench.gpu.check_products", "check", 100, "checks", beside=True),
    Part("check sampling", "checks", "bench.gpu.check_sampling", "check", 100, "checks", beside=True),
    Part("check engine", "invariant", "bench.gpu.warm_up", "invariant", 100, "checks", beside=True),
    Part("warm llama", "warm-up", "bench.gpu.warm_up", "warm_llama", 100, "checks", beside=True),
    Part("warm small", "warm-up", "bench.gpu.warm_up", "warm_small", 100, "checks", beside=True),
    Part("warm formats", "warm-up", "bench.gpu.warm_up", "warm_formats", 100, "checks", beside=True),
    Part("kernel attention", "kernels", "bench.gpu.speed_attention", "measure", 60, "kernels"),
    Part("kernel products", "kernels", "bench.gpu.speed_products", "measure", 60, "kernels"),
    Part("kernel rows", "kernels", "bench.gpu.speed_rows", "measure", 45, "kernels"),
    Part("llama 8b", "llama 8b", "bench.gpu.serve", "llama_8b", 90, "engines"),
    Part("small models", "small models", "bench.gpu.serve", "small_models", 50, "engines"),
    Part("formats", "formats", "bench.gpu.serve", "formats", 60, "engines"),
    Part("latency", "latency", "bench.gpu.serve_latency", "latency", 55, "engines"),
    Part("saturated", "saturated", "bench.gpu.serve", "saturated", 60, "engines"),
    Part("peers", "peers", "bench.gpu.peers", "against_transformers", 110, "peers"),
    Part("choices", "choices", "bench.gpu.choices", "measure", 100, "choices"),
)
BY_NAME = {part.name: part for part in PARTS}


@dataclass(frozen=True, slots=True)
class Job:
    """The parts that one process computes, one after the other."""

    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)

    @property
    def limit_s(self) -> float:
        return sum(part.limit_s for part in self.parts)


def stages(only: set[str] | None = None, *, rehearse: bool = False) -> list[list[Job]]:
    """Jobs that run at a time. `only` names targets' parts; what calibrates is always there."""
    chosen = [part for part in PARTS if only is None or part.target == "calibrate" or part.target in only]
    found: list[list[Job]] = []
    for part in chosen:
        same_family = bool(found) and found[-1][0].parts[0].family == part.family
        if same_family and rehearse:
            found[-1] = [Job((*found[-1][0].parts, part))]
        elif same_family and part.beside:
            found[-1].append(Job((part,)))
        else:
            found.append([Job((part,))])
    return found
