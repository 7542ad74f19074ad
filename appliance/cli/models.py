"""`gatehouse models`: list, add, verify, remove. Models are folders on disk; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.cli import model_store, output
from appliance.cli.connection import read_control, run
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.options import DEFAULTS, CommonOptions

if TYPE_CHECKING:
    from appliance.base.settings import Settings

app = typer.Typer(help="The models on this machine: folders in Hugging Face's layout.", no_args_is_help=True)

COLUMNS = ("name", "state", "quantization", "path")
ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or an added model's name.")]


@app.command("list")
def list_models(options: CommonOptions = DEFAULTS) -> None:
    """List the models that are served and the added ones."""
    settings = options.settings()
    rows: dict[str, dict[str, Any]] = {
        path.name: {"name": path.name, "state": _state(path), "quantization": None, "path": str(path)}
        for path in _on_disk(settings)
    }
    for name, served in _served(settings).items():
        rows[name] = {"name": name, "path": None, **rows.get(name, {}), **served}
    output.rows(list(rows.values()), COLUMNS, empty="There are no models.", as_json=options.as_json)


@app.command("add")
def add(
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of the model.")],
    name: Annotated[str | None, typer.Option(help="Name to add it under (default: the folder's).")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the files instead of linking to the folder.")] = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Verify a model and add it to the data folder. `serve --model NAME` then finds it."""
    from appliance.cli.model_check import check_model

    settings = options.settings()
    source = path.expanduser().absolute()
    place = model_store.place_for(name or source.resolve().name, settings.data_dir)
    with output.progress("Verifying", quiet=options.as_json) as report:
        facts = check_model(source, progress=report)
    if copy:
        with output.progress("Copying", quiet=options.as_json) as report:
            model_store.copy(source, place, progress=report)
    else:
        model_store.link(source, place)
    output.item({"name": place.name, "path": str(place), **facts}, as_json=options.as_json)


@app.command("verify")
def verify(
    model: ModelPath,
    perplexity: Annotated[bool, typer.Option("--perplexity", help="Measure the perplexity on a fixed text.")] = False,
    quantization: Annotated[str | None, typer.Option(help="Compare with the model in 8 bits: int8 or fp8.")] = None,
    head_quantization: Annotated[str | None, typer.Option(help="Quantization of the output head: int8 or none.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="Compare with the KV cache in 8 bits: fp8.")] = None,
    unquantized: Annotated[str | None, typer.Option(help="The model to compare a quantized checkpoint with.")] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Verify every tensor of a model. Compares it with the configuration, without loading it. With one of the options the
    model is loaded and its perplexity on a fixed text shown, next to that of the unquantized model and their ratio."""
    from appliance.cli.model_check import check_model

    formats = {"quantization": quantization, "head_quantization": head_quantization, "kv_cache_dtype": kv_cache_dtype}
    settings = options.settings()
    path = model_store.locate(model, settings.data_dir)
    plain = None if unquantized is None else str(model_store.locate(unquantized, settings.data_dir))
    named = {f"--{name.replace('_', '-')}": value for name, value in {**formats, "unquantized": plain}.items()}
    arguments = [part for option, value in named.items() if value is not None for part in (option, value)]
    with output.progress("Verifying", quiet=options.as_json) as report:
        arguments += ["--perplexity"] if perplexity else []
        facts = check_model(path, arguments, switched_off=settings.switched_off, progress=report)
    output.item({"path": str(path), **facts}, as_json=options.as_json)


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of an added model.")],
    yes: Annotated[bool, typer.Option("--yes", help="Confirm that the files of a copied model are deleted.")] = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Remove an added model. A linked folder is kept; a copy is deleted."""
    settings = options.settings()
    place = next((path for path in model_store.added_models(settings.data_dir) if path.name == name), None)
    if place is None:
        raise CommandFailed(f"no added model {name!r}", code="not_found")
    if name in _served(settings):
        raise CommandFailed(f"{name} is being served: stop the appliance, or start it without this model", code="in_use")
    if not place.is_symlink() and not yes:
        raise WrongUsage(f"{place} holds the model's files; add --yes to delete them")
    model_store.remove(place)
    output.item({"removed": name}, as_json=options.as_json)


def _on_disk(settings: Settings) -> list[Path]:
    """Return the folders that the settings name, else the demo model; then the other added models."""
    from appliance.serving.model_builder import DEMO_MODEL

    named = [model_store.locate(each.model, settings.data_dir) for each in settings.models] or [DEMO_MODEL]
    return named + [path for path in model_store.added_models(settings.data_dir) if path not in named]


def _state(path: Path) -> str:
    return "on disk" if (path / "config.json").is_file() else "missing"


def _served(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the models of the running appliance with the states and formats of their engines; empty when none runs."""
    if read_control(settings.data_dir) is None:
        return {}
    system = run(settings, lambda client: client.call("GET", "/system"))
    return {engine["model"]: {name: engine[name] for name in ("state", "quantization")} for engine in system["engine"]}
