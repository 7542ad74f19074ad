"""`gatehouse plan`: predicts the GPU memory of one model, or of all models in the settings, and how to make them fit. Needs
no GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.base.texts import did_you_mean
from appliance.cli import model_store, output
from appliance.cli.configured_models import configured_models, engine_options
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.options import AsJson, DataDir, settings_from

if TYPE_CHECKING:
    from appliance.base.settings import Settings
    from engine.simulator.fitting import PlannedModel, Refusal
    from engine.simulator.models import SimulatedGpu

NOT_ENGINE_OPTIONS = ("gpu", "memory_gib", "as_json", "data_dir")


def plan(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Folder of a model, or name of an added or known one. Without it, all models in the settings are planned "
            "with their settings.",
        ),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Another model on the same GPU, with the same options; repeatable."),
    ] = None,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU: h200, h100, a100, h20, b200, l40s, l4 or rtx-4090.")] = "h200",
    memory_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="Memory of the GPU in GiB, if it differs from --gpu.")
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Compute dtype: auto, bfloat16, float16 or float32.")] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Quantization of the weights: int8, fp8 or none for a folder (not quantized, or of a format that is decoded "
            "at load); none, int8, fp8 or int4 for a known model.",
        ),
    ] = None,
    head_quantization: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Quantization of the output head: none or int8.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="dtype of the KV cache: auto or fp8.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Maximum context length; default: the model's.")
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum number of running requests; default: chosen by the engine.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Maximum tokens per step; default: 8192.")
    ] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Disable CUDA graphs and overlapped steps.")] = False,
    gpu_memory_utilization: Annotated[float, typer.Option(metavar="FRACTION", help="Fraction of GPU memory to use.")] = 0.9,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Predict the GPU memory of a model, or of all in the settings. If one does not fit, lists remedies and exits with
    status 1."""
    from engine.errors import EngineError
    from engine.simulator.fitting import PlannedModel, plan_beside, with_memory
    from engine.simulator.models import find_gpu

    settings = settings_from(data_dir, None)
    refused: Sequence[Refusal] = ()
    try:
        card = with_memory(find_gpu(gpu), memory_gib)
        if model is None:
            _refuse_engine_options(context)
            planned = _plan_settings(settings, card)
        else:
            fit, refused = plan_beside(
                _path_or_known_name(model, settings.data_dir),
                [_path_or_known_name(other, settings.data_dir) for other in beside or ()],
                card,
                dtype=dtype,
                quantization=quantization,
                head_quantization=head_quantization,
                kv_cache_dtype=kv_cache_dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enforce_eager=enforce_eager,
                gpu_memory_utilization=gpu_memory_utilization,
            )
            for other in refused:
                sys.stderr.write(f"{other.name} is not counted: its engine would refuse it: {other.problem}\n")
            name = _name(model, settings.data_dir)
            if not fit.context_len or (max_model_len is not None and not fit.fits):
                raise CommandFailed(f"{name} does not fit: it {fit.explain(in_lines=not as_json)}", code="does_not_fit")
            planned = [PlannedModel(name, fit)]
    except EngineError as error:
        raise CommandFailed(str(error), code="invalid_option", status=2) from error
    _print(planned, gpu.lower(), None if model is None else refused, as_json=as_json)


def _refuse_engine_options(context: typer.Context) -> None:
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in NOT_ENGINE_OPTIONS and source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise WrongUsage(f"--{option} requires a MODEL: without one, all models are planned with their settings")


def _plan_settings(settings: Settings, gpu: SimulatedGpu) -> list[PlannedModel]:
    """Plan all models in the settings on one GPU. Models for the CPU are left out and named on standard error."""
    from engine.simulator.fitting import plan_together

    for model in configured_models(settings):
        model_store.locate_existing(model.model, settings.data_dir)
    planned = plan_together(engine_options(settings), gpu)
    for result in planned:
        if result.problem is not None:
            raise CommandFailed(result.problem, code="does_not_fit")
    for model in configured_models(settings):
        if settings.for_model(model).device == "cpu":
            sys.stderr.write(f"{_name(model.model, settings.data_dir)} is not planned: its device is cpu\n")
    return planned


def _print(planned: Sequence[PlannedModel], gpu: str, refused: Sequence[Refusal] | None, *, as_json: bool) -> None:
    """Print the plans. `refused`: the refused models of --beside; None if the models of the settings were planned."""
    from engine.simulator.fitting import fit_report, readable_report

    if as_json:
        reports = [{"model": model.name, "gpu": gpu, **fit_report(model.fit), **_note(model)} for model in planned]
        if refused is None:
            output.data({"data": reports})
        else:
            not_counted = [{"model": model.name, "problem": model.problem} for model in refused]
            output.data({**reports[0], "refused_beside": not_counted})
        return
    for number, model in enumerate(planned):
        if number:
            output.say("")
        output.facts({"model": model.name, "gpu": gpu, **readable_report(model.fit), **_note(model)})
        for remedy in model.fit.remedies():
            output.say(f"  {remedy}")


def _note(model: PlannedModel) -> dict[str, str]:
    return {} if model.note is None else {"note": model.note}


def _name(model: str, data_dir: Path) -> str:
    return Path(os.path.normpath(model_store.locate(model, data_dir))).name


def _path_or_known_name(model: str, data_dir: Path) -> str:
    """Return the folder of `model` if it exists, else the name of a known model. Raises CommandFailed if it is neither."""
    from engine.simulator.models import MODELS

    found = model_store.locate(model, data_dir)
    if found.exists() or model.lower() in MODELS:
        return str(found) if found.exists() else model
    known = [*MODELS, *model_store.names(data_dir)]
    close = did_you_mean(model, known) or model_store.closest_folder(found)
    message = f"model must be one of {', '.join(MODELS)}, an added model, or a folder with a config.json, not {model!r}{close}"
    raise CommandFailed(message, code="invalid_option", status=2)
