"""Models added to the data folder: `<data_dir>/models/NAME`, each a folder or a symbolic link to one."""

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
    """Return the added models, sorted by name."""
    folder = data_dir / FOLDER
    return sorted(path for path in folder.iterdir() if _NAME.match(path.name)) if folder.is_dir() else []


def locate(model: str, data_dir: Path) -> Path:
    """Resolve `model` to a folder: an existing path, else an added model, else the demo model. The result may not exist."""
    from appliance.serving.model_builder import DEMO_MODEL

    path = Path(model).expanduser()
    if path.exists() or not _NAME.match(model):
        return path.absolute()
    added = data_dir / FOLDER / model
    if added.exists():
        return added
    return DEMO_MODEL if model == DEMO_MODEL.name else path.absolute()


def new_model_path(name: str, data_dir: Path) -> Path:
    """Return the path for a new model with this name. Raises CommandFailed if the name is invalid or taken."""
    if not _NAME.match(name):
        raise WrongUsage(f"{name!r} is not a model name: use letters, digits, dots, dashes, underscores; 100 at most")
    path = data_dir / FOLDER / name
    if path.is_symlink() or path.exists():
        raise CommandFailed(f"there is already a model named {name!r}: remove it, or give another --name", code="name_taken")
    return path


def link(source: Path, path: Path) -> None:
    """Add `source` as a symbolic link. Nothing is copied, so the model depends on its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(source.resolve(), target_is_directory=True)


def copy(source: Path, path: Path, *, progress: Callable[[float], None]) -> None:
    """Add a copy of `source`, renamed into place once complete. Raises CommandFailed if there is not enough disk space."""
    files = [file for file in sorted(source.rglob("*")) if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < total:
        raise CommandFailed(f"not enough disk space at {path.parent}: {total} bytes needed, {free} free", code="disk_full")
    partial = path.parent / f".{path.name}.{os.getpid()}"
    try:
        done = 0
        for file in files:
            target = partial / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            with file.open("rb") as reader, target.open("wb") as writer:
                while chunk := reader.read(_COPY_CHUNK_BYTES):
                    writer.write(chunk)
                    done += len(chunk)
                    progress(done / max(1, total))
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove(path: Path) -> None:
    """Remove an added model: the link only, or the copied files."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
