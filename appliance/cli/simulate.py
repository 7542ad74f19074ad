"""`gatehouse simulate`: replays traffic through the engine's scheduler and caches, with a step-time model instead of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.base.digits import whole_number
from appliance.base.texts import did_you_mean
from appliance.cli import model_store, output
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.options import AsJson

if TYPE_CHECKING:
    from engine.simulator.models import SimulatedModel
    from engine.simulator.workload import Workload, WorkloadOptions

WEIGHT_MAX = 1000
TENANTS_SHOWN = 20
TENANT_COLUMNS = (
    "tenant", "weight", "requests", "good_share", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "service_s",
)  # fmt: skip


def simulate(
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Requests to replay: .csv or .jsonl.")] = None,
    scenario: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Instead of a trace: noisy-prefill, noisy-decode or noisy-none (the victims only)."),
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CSV file with prompt and output lengths of the scenario's victims.")
    ] = None,
    speed: Annotated[
        float, typer.Option(metavar="FACTOR", help="Divide arrival times by this: 2 replays twice as fast.")
    ] = 1.0,
    start: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds of the trace to skip, after --speed.")] = 0.0,
    duration: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Seconds of arrivals to replay, after --speed; default: all.")
    ] = None,
    rate: Annotated[float | None, typer.Option(metavar="N", help="Requests per second, for a trace without times.")] = None,
    sample: Annotated[float, typer.Option(metavar="FRACTION", help="Fraction of conversations to replay, above 0 to 1.")] = 1.0,
    tenants: Annotated[
        int | None, typer.Option(metavar="N", help="Number of tenants to distribute requests to, for a trace without tenants.")
    ] = None,
    weights: Annotated[str | None, typer.Option(metavar="NAME=N,…", help="Weights of tenants; default: 1 each.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of all random choices.")] = 0,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A known model, or a folder with a config.json.")
    ] = "llama-3.1-8b",
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU: h200, h100, a100, h20, b200, l40s, l4 or rtx-4090.")] = "h200",
    policy: Annotated[str, typer.Option(metavar="NAME", help="Scheduling policy: fair, fcfs, vtc or static.")] = "fair",
    max_num_seqs: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of running requests; default: chosen by the engine.")
    ] = None,
    token_budget: Annotated[
        int | None, typer.Option(metavar="N", help="Tokens per step; default: as many as the TPOT objective allows.")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Weights: int8, fp8 or none; default: as in the checkpoint.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="dtype of the KV cache: auto, bf16 or fp8.")] = "auto",
    host_cache_gib: Annotated[float, typer.Option(metavar="GIB", help="Host memory for evicted KV blocks, in GiB.")] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum output tokens per request; default: the context length.")
    ] = None,
    slo_ttft_ms: Annotated[
        float, typer.Option(metavar="MS", help="TTFT objective in ms; slower requests miss the SLO.")
    ] = 1000.0,
    slo_tpot_ms: Annotated[float, typer.Option(metavar="MS", help="TPOT objective in ms, for the SLO and the engine.")] = 25.0,
    as_json: AsJson = False,
) -> None:
    """Simulate traffic on a model, a GPU and a scheduling policy. Replays it in virtual time and predicts the service.

    Scheduler, block pool, prefix cache and fairness are the engine's own; only the duration of a step is computed by a formula.
    """
    from engine.errors import EngineError
    from engine.simulator.models import find_gpu
    from engine.simulator.replay import Replay, Setup
    from engine.simulator.report import Objective, make_report
    from engine.simulator.workload import WorkloadOptions

    try:
        objective = Objective(ttft_s=slo_ttft_ms / 1000, tpot_s=slo_tpot_ms / 1000)
        setup = Setup(
            model=_find_model(model, quantization),
            gpu=find_gpu(gpu),
            policy=policy,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            inter_token_target_s=slo_tpot_ms / 1000,
            kv_cache_dtype=kv_cache_dtype,
            host_cache_gib=host_cache_gib,
            max_tokens=max_tokens,
            weights=_weights(weights),
        )
        chosen = WorkloadOptions(
            speed=speed, start_s=start, duration_s=duration, rate=rate, sample=sample, tenants=tenants, seed=seed
        )
        workload = _workload(trace, scenario, lengths, chosen)
        _check_names(setup.weights, workload)
        replay = Replay(setup, workload)
        with output.progress("Simulating", quiet=as_json) as progress:
            replay.run(progress)
        report = make_report(replay, objective)
    except EngineError as error:
        raise _failure(error) from error
    if as_json:
        output.data(report)
    else:
        _print(report)


def _find_model(model: str, quantization: str | None) -> SimulatedModel:
    """Return a known model or that of a folder. Raises WrongUsage with the closest one if it is neither, and EngineError."""
    from engine.errors import EngineConfigError
    from engine.simulator.models import MODELS, find_model

    try:
        return find_model(model, quantization)
    except EngineConfigError as error:
        if error.option != "model":
            raise
        path = Path(model).expanduser().absolute()
        hint = did_you_mean(model.lower(), list(MODELS)) or model_store.closest_folder(path)
        raise WrongUsage(f"--{error}{hint}") from error


def _workload(trace: Path | None, scenario: str | None, lengths: Path | None, options: WorkloadOptions) -> Workload:
    from engine.simulator.workload import WorkloadOptions, load_workload, make_scenario

    if (trace is None) == (scenario is None):
        raise WrongUsage("give either --trace FILE or --scenario NAME")
    if scenario is not None:
        if options != WorkloadOptions(seed=options.seed):
            raise WrongUsage("--speed, --start, --duration, --rate, --sample and --tenants require --trace")
        return make_scenario(scenario, seed=options.seed, lengths=lengths)
    assert trace is not None
    if lengths is not None:
        raise WrongUsage("--lengths requires --scenario")
    return load_workload(trace, options)


def _weights(text: str | None) -> dict[str, int]:
    weights: dict[str, int] = {}
    for part in text.split(",") if text else []:
        name, _, number = part.rpartition("=")
        weight = whole_number(number, WEIGHT_MAX)
        if not name or not weight:
            raise WrongUsage(f"--weights must be NAME=N,NAME=N with N from 1 to {WEIGHT_MAX}, not {part!r}")
        weights[name] = weight
    return weights


def _check_names(weights: dict[str, int], workload: Workload) -> None:
    unknown = sorted(set(weights) - {request.tenant for request in workload.requests})
    if unknown:
        raise WrongUsage(f"--weights names the tenant {unknown[0]!r}, which has no requests in this traffic")


def _failure(error: Exception) -> CommandFailed:
    """Convert the engine's error to CommandFailed; options are named as on the command line."""
    from engine.errors import EngineConfigError, TraceError

    if isinstance(error, EngineConfigError):
        option = "--" + error.option.replace("_", "-")
        return WrongUsage(f"{option}{str(error).removeprefix(error.option)}")
    return CommandFailed(str(error), code="bad_trace" if isinstance(error, TraceError) else "not_a_model")


def _print(report: dict[str, Any]) -> None:
    from engine.simulator.report import flatten

    tenants = report["tenants"]
    output.facts(flatten(report))
    output.say("")
    shown = sorted(tenants, key=lambda tenant: -tenant["service_s"])[:TENANTS_SHOWN]
    percentiles = [(figure, name) for figure in ("ttft", "tpot") for name in ("p50", "p99")]
    rows = [tenant | {f"{figure}_{name}_ms": tenant[f"{figure}_ms"][name] for figure, name in percentiles} for tenant in shown]
    output.table(rows, TENANT_COLUMNS, empty="No tenants.")
    if len(tenants) > len(shown):
        output.say(f"{len(tenants) - len(shown)} more tenants, with less service, are shown only with --json.")
