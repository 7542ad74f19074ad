"""The GPU benchmark on other GPUs than that of its goals: what fits, what is judged, and what is only reported."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import models, serve
from bench.gpu.context import Context
from bench.gpu.driver import version
from bench.gpu.plan import PARTS, Part
from bench.gpu.processes import Outcome
from bench.gpu.report import document, table
from bench.gpu.rows import GOALS_CARD, Row, Target, verdict
from bench.gpu.targets import TARGETS
from engine.config.model import parse_model_config
from engine.memory.estimate import DeviceMemory, estimate_fit
from engine.memory.fit import MemoryFit
from engine.memory.needs import CONTEXT_BYTES, GIB
from engine.options import EngineOptions
from engine.simulator.models import find_gpu
from engine.step_mode import StepMode

H100 = "NVIDIA H100 80GB HBM3"
NOT_THAT_CARD = (H100, "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GH200 480GB", "")
SAID = {
    "memory_bytes": 84_900_000_000,
    "multiprocessors": 132,
    "l2_bytes": 50 << 20,
    "capability": "9.0",
    "driver": "580.95.05",
}
OF_THE_HOST = (
    "host critical path per step, batch 256",
    "start of Llama-3.1-8B beyond reading weights, warm cache",
)
"""Times that the machine around the card decides."""
CHECKS_BYTES = 20 * GIB
"""For what the checks of kernels hold beside the engines of their stage: on a rehearsed card those of attention had 8.0 GiB at
their peak, those of sampling 5.4."""


@pytest.mark.parametrize("card", NOT_THAT_CARD)
def test_a_rate_of_one_gpu_is_not_judged_on_another(card: str) -> None:
    target = Target(name="x", part="kernels", unit="tokens/s", pass_at=230, stretch_at=255, card_specific=True)
    rows = [Row(name="x", value=value) for value in (180.0, 240.0, 900.0)]
    assert [verdict(row, target, card=GOALS_CARD) for row in rows] == ["below", "pass", "stretch"]
    assert {verdict(row, target, card=card) for row in rows} == {"other card"}
    assert verdict(Row(name="x", value=240.0, fraction=1.2), target, card=card) == "INVALID"
    assert verdict(Row(name="x", error="it broke"), target, card=card) == "failed"
    assert target.text == "≥ 230 / 255 (H200)"


@pytest.mark.parametrize("judged", ["fraction", "ratio"])
def test_fractions_and_ratios_are_judged_on_every_gpu(judged: Any) -> None:
    target = Target(name="x", part="kernels", unit="GB/s", judged=judged, pass_at=0.85, stretch_at=0.92)
    assert verdict(Row(name="x", value=1.0, fraction=0.9, ratio=0.9), target, card=H100) == "pass"


def test_goals_in_times_and_rates_apply_to_one_gpu_unless_they_measure_the_host() -> None:
    timed = {target.name for target in TARGETS if target.unit in ("tokens/s", "µs", "ms", "s") and target.judged == "value"}
    with_goals = {target.name for target in TARGETS if target.pass_at is not None}
    assert {target.name for target in TARGETS if target.card_specific} == (timed & with_goals) - set(OF_THE_HOST)


@pytest.mark.parametrize("name", [GOALS_CARD, H100])
def test_a_result_names_its_gpu_and_that_of_the_goals(name: str) -> None:
    facts = {"card": {"name": name, **SAID}, "bandwidth": 3e12, "flops": 8e14}
    rows = [Row(name="Llama-3.1-8B bf16, batch 1", value=190.0, limit=200.0, fraction=0.95)]
    report = document(rows, Outcome(facts=facts), rehearsal=False, taken_s=1.0)
    is_goals_card = name == GOALS_CARD
    assert report["card"] == {"name": name, **SAID}
    assert (report["goals_of"], report["goals_are_judged"]) == (GOALS_CARD, is_goals_card)
    assert report["rows"][0]["verdict"] == ("below" if is_goals_card else "other card")
    lines = table(report).splitlines()
    assert lines[0].startswith(
        f"{name}, 79.1 GiB, 132 multiprocessors, 50 MiB of second-level cache, capability 9.0, driver 580.95.05 · "
    )
    (goals,) = [line for line in lines if "goals marked (H200)" in line]
    assert ("not judged on this card" in goals) is not is_goals_card


def test_the_driver_version_is_parsed_from_its_output() -> None:
    assert version("driver_version, clocks.current.sm [MHz] | 580.95.05, 1980 MHz") == "580.95.05"
    assert version("FileNotFoundError: nvidia-smi") is None


class NoEngine(Exception):
    """What a part gets for the engine that it asks for. Where it is not guarded the part ends with it."""


def engines_of(part: Part, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Name and options of each engine that a part asks for on a card."""
    asked: list[tuple[str, dict[str, Any]]] = []
    module = importlib.import_module(part.module)

    def noted(_: Context, __: Path, name: str, **options: Any) -> None:
        asked.append((name, options))
        raise NoEngine

    monkeypatch.setattr(module, "random_engine", noted)
    measure: Callable[[Context], None] = getattr(module, part.function)
    with suppress(NoEngine):
        measure(Context(torch.device("cpu"), False, {}, lambda _: None, 0.0, clock=lambda: 0.0))
    return asked


def fit_on(gpu: str, name: str, options: dict[str, Any]) -> tuple[MemoryFit, int]:
    """What the engine needs, and the bytes of its cache: those that are asked for, or all that is left."""
    options = dict(options)
    config = {**models.CONFIGS[name], "dtype": "bfloat16"}
    config["num_hidden_layers"] = options.pop("layers", None) or config["num_hidden_layers"]
    if options.pop("int4", False):
        config["quantization_config"] = models.INT4
    asked = EngineOptions(model=Path(name), device="cuda", **options)
    card = find_gpu(gpu)
    memory = DeviceMemory(
        device_type="cuda",
        usable_bytes=int(card.memory_bytes * asked.gpu_memory_utilization),
        context_bytes=CONTEXT_BYTES,
        capability=card.capability,
    )
    fit = estimate_fit(parse_model_config(config, {}), asked, "bfloat16", memory, StepMode.CAPTURED)
    return fit, asked.kv_cache_bytes or fit.needs.num_blocks(fit.usable_bytes) * fit.needs.block_bytes


ENGINES = [part for part in PARTS if part.module.startswith(("bench.gpu.serve", "bench.gpu.warm_up", "bench.gpu.same"))]


@pytest.mark.parametrize("gpu", ["h200", "h100"])
@pytest.mark.parametrize("part", ENGINES, ids=lambda part: part.name)
def test_every_engine_of_a_part_fits_the_gpu(part: Part, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = engines_of(part, monkeypatch)
    assert engines
    for name, options in engines:
        fit, kv_bytes = fit_on(gpu, name, options)
        assert fit.needs.fixed_bytes + kv_bytes <= fit.usable_bytes, (name, options)


def test_the_engines_of_the_checks_fit_an_h100_together(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 0
    for part in (part for part in ENGINES if part.concurrent):
        fits = [fit_on("h100", *engine) for engine in engines_of(part, monkeypatch)]
        most = max(fit.needs.fixed_bytes + kv_bytes for fit, kv_bytes in fits)
        needed += 2 * most if part.name == "check tokens" else most  # two engines, one beside the other
    assert needed + CHECKS_BYTES <= find_gpu("h100").memory_bytes * 0.9


def test_a_closed_loop_runs_as_many_requests_as_the_cache_holds() -> None:
    def seats(gpu: str) -> int:
        fit, kv_bytes = fit_on(gpu, "llama-3.1-8b", {"max_num_seqs": serve.MANY_SEATS, "max_model_len": 2048})
        return serve.num_seats(kv_bytes // fit.needs.block_bytes * 16, 1000, 1000, 16, serve.MANY_SEATS)

    assert seats("h200") == 512
    assert 260 <= seats("h100") <= 280
