"""Models added to the data folder: `<data_dir>/models/NAME`, each a folder of its own or a link to one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from appliance.cli.failure import CommandFailed, WrongUsage

FOLDER = "models"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
_COPY_CHUNK_BYTES = 16 * 1024 * 1024


def added_models(data_dir: Path) -> list[Path]:
    """Return the added models in the order of their names."""
    folder = data_dir / FOLDER
    return sorted(path for path in folder.iterdir() if _NAME.match(path.name)) if folder.is_dir() else []


def locate(model: str, data_dir: Path) -> Path:
    """Return the folder that `model` names: a path, else an added model, else the demo model. It need not exist."""
    from appliance.serving.model_builder import DEMO_MODEL

    path = Path(model).expanduser()
    if path.exists() or not _NAME.match(model):
        return path.absolute()
    added = data_dir / FOLDER / model
    if added.exists():
        return added
    return DEMO_MODEL if model == DEMO_MODEL.name else path.absolute()


def place_for(name: str, data_dir: Path) -> Path:
    """Return the folder for a new model of this name. Raises CommandFailed for a bad or taken name."""
    if not _NAME.match(name):
        raise WrongUsage(f"{name!r} cannot be a model's name: letters, digits, dot, dash and underscore, 100 at most")
    place = data_dir / FOLDER / name
    if place.is_symlink() or place.exists():
        raise CommandFailed(f"there is a model {name!r} already; remove it first, or give --name", code="name_taken")
    return place


def link(source: Path, place: Path) -> None:
    """Add `source` as a link: nothing is copied, and the model is gone when its folder is."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(source.resolve(), target_is_directory=True)


def copy(source: Path, place: Path, *, progress: Callable[[float], None]) -> None:
    """Add a copy of `source`, which gets its name only when complete. Raises CommandFailed if there is not enough space."""
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    place.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place.parent).free
    if free < total:
        raise CommandFailed(f"{total} bytes are needed at {place.parent}, {free} are free", code="disk_full")
    unfinished = place.parent / f".{place.name}.{os.getpid()}"
    try:
        done = 0
        for file in files:
            target = unfinished / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as reader, target.open("wb") as writer:
                while chunk := reader.read(_COPY_CHUNK_BYTES):
                    writer.write(chunk)
                    done += len(chunk)
                    progress(done / max(1, total))
        unfinished.rename(place)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def remove(place: Path) -> None:
    """Remove an added model: only the link, or the copy with its files."""
    if place.is_symlink():
        place.unlink()
    else:
        shutil.rmtree(place)
