"""`gatehouse models plan`: what a model would take of a GPU's memory, and what would make it fit. Needs neither of them."""

from __future__ import annotations

from typing import Annotated

import typer

from appliance.cli import output
from appliance.cli.failure import CommandFailed
from appliance.cli.options import AsJson

GIB = 1 << 30


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A known model, or a folder with a config.json.")],
    gpu: Annotated[str, typer.Option(help="h200, h100, a100 or h20.")] = "h200",
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory of another GPU, instead of --gpu.", show_default=False)
    ] = None,
    quantization: Annotated[str, typer.Option(help="How the weights are kept: none, int8, fp8 or int4.")] = "none",
    head_quantization: Annotated[
        str | None, typer.Option(help="How the output head is kept: none or int8.", show_default=False)
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="How keys and values are kept: auto or fp8.")] = "auto",
    max_model_len: Annotated[
        int | None, typer.Option(help="The context that is wanted; default: the model's.", show_default=False)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at a time.")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens of one step.")] = 8192,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the memory that may be used.")] = 0.9,
    as_json: AsJson = False,
) -> None:
    """Predict the memory that a model takes on a GPU. Fails when it does not fit, with what would help."""
    from engine.errors import EngineError
    from engine.simulator.fitting import facts, memory_fit
    from engine.simulator.models import find_gpu, find_model

    try:
        known = find_model(model)
        memory_bytes = find_gpu(gpu).memory_bytes if memory_gib is None else int(memory_gib * GIB)
        fit = memory_fit(
            known,
            memory_bytes,
            quantization=quantization,
            head_quantization=head_quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
        )
    except EngineError as error:
        raise CommandFailed(str(error), code="invalid_option", status=2) from error
    if not fit.context_len or (max_model_len is not None and not fit.fits):
        raise CommandFailed(f"{known.name} does not fit: it {fit.explain()}", code="does_not_fit")
    output.thing({"model": known.name, **facts(fit)}, as_json=as_json)
