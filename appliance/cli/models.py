"""`gatehouse models`: list, add, verify and remove models. Models are folders on disk; nothing is downloaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.base.texts import did_you_mean
from appliance.cli import model_store, output
from appliance.cli.configured_models import configured_models
from appliance.cli.connection import read_control, run
from appliance.cli.failure import CommandFailed, WrongUsage
from appliance.cli.options import DEFAULTS, CommonOptions

if TYPE_CHECKING:
    from appliance.base.settings import Settings

app = typer.Typer(help="Manage the models on this machine, in Hugging Face format.", no_args_is_help=True)

COLUMNS = ("name", "state", "quantization", "path")
ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or name of an added one.")]


@app.command("list")
def list_models(options: CommonOptions = DEFAULTS) -> None:
    """List the served and the added models."""
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
    path: Annotated[Path, typer.Argument(metavar="FOLDER", help="The model's folder.")],
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the model; default: the folder's name.")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the files instead of linking to the folder.")] = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Verify a model and add it to the data folder. Serve it with `gatehouse serve --model NAME`."""
    from appliance.cli.model_check import check_model

    settings = options.settings()
    source = path.expanduser().absolute()
    model_store.check_folder(source)
    target = model_store.new_model_path(name or source.resolve().name, settings.data_dir)
    with output.progress("Verifying", quiet=options.as_json) as report:
        facts = check_model(source, progress=report)
    if copy:
        with output.progress("Copying", quiet=options.as_json) as report:
            model_store.copy(source, target, progress=report)
    else:
        model_store.link(source, target)
    output.item({"name": target.name, "path": str(target), **facts}, as_json=options.as_json)


@app.command("verify")
def verify(
    model: ModelPath,
    perplexity: Annotated[bool, typer.Option("--perplexity", help="Measure the perplexity on a fixed text.")] = False,
    quantization: Annotated[str | None, typer.Option(metavar="FORMAT", help="Compare with 8-bit weights: int8 or fp8.")] = None,
    head_quantization: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="Quantization of the output head: int8 or none.")
    ] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(metavar="FORMAT", help="Compare with an 8-bit KV cache: fp8.")] = None,
    unquantized: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Unquantized model to compare a quantized checkpoint with.")
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Verify all tensors of a model against its configuration. Does not load the model, except with one of the options from
    --perplexity to --unquantized: these show its perplexity on a fixed text, next to that of the unquantized model and their
    ratio."""
    from appliance.cli.model_check import check_model

    formats = {"quantization": quantization, "head_quantization": head_quantization, "kv_cache_dtype": kv_cache_dtype}
    settings = options.settings()
    path = model_store.locate_existing(model, settings.data_dir)
    reference = None if unquantized is None else str(model_store.locate_existing(unquantized, settings.data_dir))
    given = {f"--{name.replace('_', '-')}": value for name, value in {**formats, "unquantized": reference}.items()}
    arguments = [part for option, value in given.items() if value is not None for part in (option, value)]
    arguments += ["--perplexity"] if perplexity else []
    with output.progress("Verifying", quiet=options.as_json) as report:
        facts = check_model(path, arguments, switched_off=settings.switched_off, progress=report)
    output.item({"path": str(path), **facts}, as_json=options.as_json)


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The added model's name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Confirm that a copied model's files are deleted.")] = False,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Remove an added model. A linked folder is kept; a copy is deleted."""
    settings = options.settings()
    added = {path.name: path for path in model_store.added_models(settings.data_dir)}
    if name not in added:
        hint = did_you_mean(name, list(added)) or model_store.list_added(list(added))
        raise CommandFailed(f"there is no added model named {name!r}{hint}", code="not_found")
    path = added[name]
    if name in _served(settings):
        raise CommandFailed(f"{name} is being served: stop the appliance, or restart it without this model", code="in_use")
    if not path.is_symlink() and not yes:
        raise WrongUsage(f"{path} contains the model's files; add --yes to delete them")
    model_store.remove(path)
    output.item({"removed": name}, as_json=options.as_json)


def _on_disk(settings: Settings) -> list[Path]:
    """Return the folders of the models in the settings, or the demo model; then the other added models."""
    configured = [model_store.locate(model.model, settings.data_dir) for model in configured_models(settings)]
    return configured + [path for path in model_store.added_models(settings.data_dir) if path not in configured]


def _state(path: Path) -> str:
    return "on disk" if (path / "config.json").is_file() else "missing"


def _served(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the models of the running appliance with the state and quantization of their engines; empty if none runs."""
    if read_control(settings.data_dir) is None:
        return {}
    system = run(settings, lambda client: client.call("GET", "/system"))
    return {engine["model"]: {name: engine[name] for name in ("state", "quantization")} for engine in system["engine"]}
