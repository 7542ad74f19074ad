"""`gatehouse plan`: how much of a GPU's memory a model would take, and what would make it fit. Needs neither of the two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from appliance.cli import model_store, output
from appliance.cli.failure import CommandFailed
from appliance.cli.options import AsJson, DataDir, settings_from


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or the name of an added or a known model.")],
    beside: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Another model served from the same GPU with the same options; repeatable."),
    ] = None,
    gpu: Annotated[str, typer.Option(help="GPU: h200, h100, a100, h20, b200, l40s, l4 or rtx-4090.")] = "h200",
    memory_gib: Annotated[float | None, typer.Option(help="Memory of the GPU in GiB, if it differs from --gpu.")] = None,
    dtype: Annotated[str, typer.Option(help="Compute dtype: auto, bfloat16, float16 or float32.")] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option(
            help="Quantization. Of a folder that is not quantized, or is decoded while it is read: int8, fp8 or none. "
            "Of a known model: none, int8, fp8 or int4."
        ),
    ] = None,
    head_quantization: Annotated[str | None, typer.Option(help="Quantization of the output head: none or int8.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="dtype of the KV cache: auto or fp8.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Maximum context in tokens; default: that of the model.")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Maximum number of running requests; default: as the engine chooses.")
    ] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Maximum tokens per step; default: 8192.")] = None,
    enforce_eager: Annotated[bool, typer.Option("--enforce-eager", help="Disable CUDA graphs and overlapped steps.")] = False,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Fraction of GPU memory to use.")] = 0.9,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Predict the memory that a model takes on a GPU. If it does not fit, lists what would help; exit status 1."""
    from engine.errors import EngineError
    from engine.simulator.fitting import fit_report, memory_fit, readable_report, with_memory
    from engine.simulator.models import find_gpu

    folder = settings_from(data_dir, None).data_dir
    found = model_store.locate(model, folder)
    try:
        fit = memory_fit(
            _path_or_known_name(model, folder),
            with_memory(find_gpu(gpu), memory_gib),
            dtype=dtype,
            quantization=quantization,
            head_quantization=head_quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enforce_eager=enforce_eager,
            gpu_memory_utilization=gpu_memory_utilization,
            beside=[_path_or_known_name(other, folder) for other in beside or ()],
        )
    except EngineError as error:
        raise CommandFailed(str(error), code="invalid_option", status=2) from error
    name = Path(os.path.normpath(found)).name
    if not fit.context_len or (max_model_len is not None and not fit.fits):
        raise CommandFailed(f"{name} does not fit: it {fit.explain(in_lines=not as_json)}", code="does_not_fit")
    if as_json:
        output.data({"model": name, "gpu": gpu.lower(), **fit_report(fit)})
        return
    output.facts({"model": name, "gpu": gpu.lower(), **readable_report(fit)})
    for remedy in fit.remedies():
        output.say(f"  {remedy}")


def _path_or_known_name(model: str, data_dir: Path) -> str:
    """Return the folder of `model` if there is one, else the name, which may be a known one."""
    found = model_store.locate(model, data_dir)
    return str(found) if found.exists() else model
