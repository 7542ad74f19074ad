"""The parts of a run, in order: what each measures, how long it may take, and which run side by side. Standard library only.

    calibrate → checks, with every kernel of the engines compiled meanwhile → kernels → engines → peers

Checks are not timed, so several processes share the card and the compiler has all cores. Everything after them runs alone.
Limits are for a cold cache of kernels; the usual sum is less, and no part begins that the rest of the time cannot hold.
"""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 470.0
"""Of the whole command; eight minutes with what starting and writing takes."""


@dataclass(frozen=True, slots=True)
class Part:
    """`target` is the part of the targets whose rows it gives. Parts with the same `group` run side by side."""

    name: str
    target: str
    module: str
    function: str
    limit_s: float
    group: str = ""


PARTS: tuple[Part, ...] = (
    Part("calibrate", "calibrate", "bench.gpu.calibration", "calibrate", 40),
    Part("check attention", "checks", "bench.gpu.check_attention", "check", 100, "checks"),
    Part("check rows", "checks", "bench.gpu.check_rows", "check", 100, "checks"),
    Part("check products", "checks", "bench.gpu.check_products", "check", 100, "checks"),
    Part("check sampling", "checks", "bench.gpu.check_sampling", "check", 100, "checks"),
    Part("check engine", "invariant", "bench.gpu.warm_up", "invariant", 100, "checks"),
    Part("warm llama", "warm-up", "bench.gpu.warm_up", "warm_llama", 100, "checks"),
    Part("warm small", "warm-up", "bench.gpu.warm_up", "warm_small", 100, "checks"),
    Part("warm formats", "warm-up", "bench.gpu.warm_up", "warm_formats", 100, "checks"),
    Part("kernel attention", "kernels", "bench.gpu.speed_attention", "measure", 60),
    Part("kernel products", "kernels", "bench.gpu.speed_products", "measure", 60),
    Part("kernel rows", "kernels", "bench.gpu.speed_rows", "measure", 45),
    Part("llama 8b", "llama 8b", "bench.gpu.serve", "llama_8b", 90),
    Part("small models", "small models", "bench.gpu.serve", "small_models", 50),
    Part("formats", "formats", "bench.gpu.serve", "formats", 60),
    Part("latency", "latency", "bench.gpu.serve_latency", "latency", 40),
    Part("saturated", "saturated", "bench.gpu.serve", "saturated", 60),
    Part("peers", "peers", "bench.gpu.peers", "against_transformers", 110),
)


def stages(only: set[str] | None = None) -> list[list[Part]]:
    """Parts that run at a time. `only` names targets' parts; what calibrates is always there."""
    found: list[list[Part]] = []
    for part in PARTS:
        if only is not None and part.target != "calibrate" and part.target not in only:
            continue
        if found and part.group and found[-1][0].group == part.group:
            found[-1].append(part)
        else:
            found.append([part])
    return found
