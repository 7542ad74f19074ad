"""`gatehouse doctor`: checks everything that a start requires, with advice for each problem."""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.base.clock import SystemClock
from appliance.cli import output
from appliance.cli.configured_models import configured_models, engine_options
from appliance.cli.connection import read_control
from appliance.cli.failure import CommandFailed
from appliance.cli.model_store import locate, locate_existing
from appliance.cli.options import DEFAULTS, CommonOptions

if TYPE_CHECKING:
    from appliance.base.engine_settings import ModelSettings
    from appliance.base.settings import Settings
    from engine.errors import EngineError
    from engine.visible_gpu import VisibleGpu

MIB = 1024 * 1024
DISK_FREE_MIN_BYTES = 500 * MIB
UNPRICED_DAYS = 30
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
DISK_FULL_ADVICE = "free some disk space"
NOT_A_MODEL_ADVICE = "give --model the folder of a model"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. `state` is ok, note or wrong; `advice` says what to do, empty if nothing."""

    name: str
    state: str
    found: str
    advice: str = ""


def doctor(
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address that the appliance would listen on.")] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Port that the appliance would listen on.")] = None,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="Folder of a model, or name of an added one; repeatable."),
    ] = None,
    options: CommonOptions = DEFAULTS,
) -> None:
    """Check this installation and report problems. Checks Python, disk, port, database, secrets, prices, models and GPU. Exit
    status 1 if a check finds a fault."""
    from engine.visible_gpu import first_visible_gpu

    settings = options.settings(host=host, port=port, models=tuple(model) if model else None)
    gpu, no_gpu_reason = first_visible_gpu()
    checkers: list[Callable[[Settings], list[Check]]] = [
        _python,
        _disk,
        _port,
        _database,
        _secrets,
        _prices,
        partial(_models, gpu=gpu),
        _model_names,
        _switches,
        partial(_gpu, gpu=gpu, no_gpu_reason=no_gpu_reason),
    ]
    checks = [check for checker in checkers for check in checker(settings)]
    wrong = [check for check in checks if check.state == "wrong"]
    rows = [{"check": check.name, "state": check.state, "found": check.found, "advice": check.advice} for check in checks]
    if options.as_json:
        output.data({"data": rows, "ok": not wrong})
    else:
        output.table(rows, ("check", "state", "found", "advice"), empty="")
    if wrong:
        raise typer.Exit(1)


def _python(_settings: Settings) -> list[Check]:
    """Report the Python version; one that is too old cannot get this far."""
    return [Check("python", "ok", f"{platform.python_version()} at {sys.executable}")]


def _disk(settings: Settings) -> list[Check]:
    existing = settings.data_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        _try_to_write(existing)
    except OSError as error:
        advice = DISK_FULL_ADVICE if error.errno in DISK_FULL else "give another folder with --data-dir, or change its owner"
        return [Check("data folder", "wrong", f"{settings.data_dir} is not writable: {error.strerror}", advice)]
    free = shutil.disk_usage(existing).free
    if free < DISK_FREE_MIN_BYTES:
        return [Check("data folder", "wrong", f"{settings.data_dir}: only {free // MIB} MiB free", DISK_FULL_ADVICE)]
    return [Check("data folder", "ok", f"{settings.data_dir}: {free // MIB} MiB free")]


def _try_to_write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"0")


def _port(settings: Settings) -> list[Check]:
    control = read_control(settings.data_dir)
    if control is not None:
        return [Check("appliance", "ok", f"running at {control.url} (pid {control.pid})"), *_readiness(control.url)]
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        found = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        return [Check("port", "wrong", found, "stop the other program, or choose another --port")]
    return [Check("appliance", "note", "not running"), Check("port", "ok", f"{settings.host}:{settings.port} is free")]


def _readiness(url: str) -> list[Check]:
    import httpx

    try:
        answer = httpx.get(f"{url}/health/ready", timeout=10, trust_env=False)
        parts, notes = (answer.json().get(name, {}) for name in ("parts", "notes"))
    except (httpx.HTTPError, ValueError) as error:
        return [Check("ready", "wrong", f"the appliance does not respond: {error}", "look at its log; restart it")]
    bad = {name: state for name, state in parts.items() if state != "ok"}
    if answer.is_success:
        advice = "its reason is in the console and the log"
        slow = [Check("ready", "note", f"{name} {note}", advice) for name, note in notes.items()]
        return [Check("ready", "ok", "all parts are ready"), *slow]
    sentences = [state if name.startswith("engine ") else f"{name} {state}" for name, state in bad.items()]
    found = ", ".join(sentences) or f"status {answer.status_code}"
    return [Check("ready", "wrong", found, "wait if a model is loading, else look at the log")]


def _database(settings: Settings) -> list[Check]:
    from sqlalchemy.exc import SQLAlchemyError

    from appliance.base import db, migrations
    from appliance.base.database_encoding import ENCODING, encoding_of
    from appliance.cli import database_fault

    if _is_created_at_start(settings):
        return [Check("database", "ok", "none yet; the first start creates it")]

    async def try_to_write() -> tuple[str, str]:
        async with db.Database.open(settings.database_url) as database:
            await database_fault.try_to_write(database)
            async with database.reading() as connection:
                return database.kind, await connection.run_sync(encoding_of)

    try:
        kind, encoding = asyncio.run(try_to_write())
        current, head = migrations.current_revision(settings.database_url), migrations.head_revision()
    except (SQLAlchemyError, OSError, ValueError) as error:
        return [Check("database", "wrong", *database_fault.describe(error, settings))]
    if encoding != ENCODING:
        advice = f"move it to a database created with ENCODING '{ENCODING}': pg_dump, then psql"
        return [
            Check("database", "wrong", f"{kind} with encoding {encoding}: names with other characters cannot be stored", advice)
        ]
    if current is not None and not migrations.is_known(current):
        advice = "start the newer version that migrated it, or restore a backup"
        return [Check("database", "wrong", f"{kind}, at revision {current}, which this version does not know", advice)]
    if current != head:
        where = f"at revision {current}" if current else "no tables yet"
        return [Check("database", "note", f"{kind}, {where}", "the next start upgrades it")]
    return [Check("database", "ok", f"{kind}, writable, at revision {head}")]


def _secrets(settings: Settings) -> list[Check]:
    """Check that `secret.key` is the key that sealed the stored second factors and signing secrets."""
    from sqlalchemy.exc import SQLAlchemyError

    from appliance.base import db
    from appliance.base.data_folder import PEPPER_FILE
    from appliance.base.settings import UnusableData
    from appliance.metering import sealed_secrets
    from appliance.tenancy.secrets import read_pepper

    async def find_unreadable(pepper: bytes | None) -> sealed_secrets.SealedSecrets:
        async with db.Database.open(settings.database_url) as database, database.reading() as connection:
            return await sealed_secrets.find_unreadable(connection, pepper)

    if _is_created_at_start(settings):
        return []
    path = settings.data_dir / PEPPER_FILE
    try:
        found = asyncio.run(find_unreadable(read_pepper(settings.data_dir) if path.exists() else None))
    except UnusableData as error:
        return [Check("secrets", "wrong", str(error), "restore it from the backup of this database")]
    except (SQLAlchemyError, OSError, ValueError):
        return []  # reported by the check of the database, or not migrated yet
    if not found.unreadable:
        return [Check("secrets", "ok", f"{found.stored} sealed, all readable with {path.name}")]
    fault = "is not the key that sealed" if path.exists() else "does not exist, but is needed for"
    text = f"{path} {fault} {found.unreadable} of {found.stored} stored secrets"
    return [Check("secrets", "wrong", text, sealed_secrets.ADVICE)]


def _is_created_at_start(settings: Settings) -> bool:
    """Return whether the database is a file that the first start will create."""
    path = settings.database_url.removeprefix("sqlite:///")
    return settings.database_url.startswith("sqlite:///") and not Path(path).exists()


def _prices(settings: Settings) -> list[Check]:
    """Report recently used models that cost nothing because they have no price in the currency."""
    from sqlalchemy.exc import SQLAlchemyError

    from appliance.base import db
    from appliance.metering.ledger import rollups
    from appliance.metering.prices import PriceBook

    if _is_created_at_start(settings):
        return []

    async def find_unpriced() -> Sequence[tuple[str, str]]:
        clock = SystemClock()
        async with db.Database.open(settings.database_url) as database:
            async with database.reading() as connection:
                used = await rollups.models_used_since(connection, clock.now() - timedelta(days=UNPRICED_DAYS))
            return await PriceBook(database, clock, currency=settings.currency).unpriced(used, clock.now())

    try:
        missing = asyncio.run(find_unpriced())
    except (SQLAlchemyError, OSError, ValueError):
        return []  # reported by the check of the database, or not migrated yet
    advice = "add one: gatehouse prices add"
    return [
        Check("prices", "note", f"{model} has no price in {currency}: its requests cost nothing", advice)
        for model, currency in missing
    ]


def _models(settings: Settings, gpu: VisibleGpu | None) -> list[Check]:
    if not settings.models and read_control(settings.data_dir) is not None:
        return []  # the running appliance may serve other models; its readiness covers them
    models = zip(configured_models(settings), _start_problems(settings, gpu), strict=True)
    return [_model(model, problem, settings) for model, problem in models]


def _model(model: ModelSettings, problem: EngineError | None, settings: Settings) -> Check:
    """Check one model. `problem`: why its engine would refuse to start, found in its configuration; if there is none, its
    tensors are checked, which takes seconds."""
    from appliance.cli.model_check import check_model
    from appliance.serving.model_folder import NotAModel, check_folder_name

    name, own = f"model {locate(model.model, settings.data_dir).name}", settings.for_model(model)
    advice = NOT_A_MODEL_ADVICE
    try:
        path = locate_existing(model.model, settings.data_dir)
        check_folder_name(path)
        if problem is not None:
            return Check(name, "wrong", str(problem), _start_advice(problem, own))
        facts = check_model(path)
        if own.draft_folder is not None:
            advice = _setting_advice("speculative")
            check_model(own.draft_folder, ["--draft"])
    except NotAModel as error:
        return Check(name, "wrong", str(error), advice)
    except CommandFailed as failure:
        return Check(name, "wrong", failure.message, advice)
    return Check(name, "ok", f"{facts['architecture']}, {facts['parameters'] / 1e6:.1f} million parameters")


def _start_advice(problem: EngineError, own: Settings) -> str:
    """Return what to do about `problem`. `own`: the settings of this model."""
    from appliance.base.engine_settings import SETTING_NAMES
    from engine.errors import EngineConfigError

    if not isinstance(problem, EngineConfigError):
        return NOT_A_MODEL_ADVICE
    if problem.option == "model":
        return "make a change that is listed, or serve fewer or smaller models"
    setting = SETTING_NAMES.get(problem.option, problem.option)
    if getattr(own, setting, None) is None:
        return f"give {setting} a value in the settings"
    return _setting_advice(setting)


def _setting_advice(setting: str) -> str:
    return f"correct the setting {setting}, or leave it out for its default"


def _start_problems(settings: Settings, gpu: VisibleGpu | None) -> Sequence[EngineError | None]:
    """Return for each configured model why its engine would refuse to start on this machine, None if it would start."""
    from engine.simulator.refusals import gpu_of_machine, start_problems

    machine = None if gpu is None else gpu_of_machine(gpu.memory_bytes, gpu.capability)
    return start_problems(engine_options(settings), machine)


def _model_names(settings: Settings) -> list[Check]:
    """Report folders with the same name, which a start refuses: models are served under their folders' names."""
    advice = "serve only one of them, or add the other one under another name: gatehouse models add --name"
    folders: dict[str, Path] = {}
    checks = []
    for model in settings.models:
        path = locate(model.model, settings.data_dir)
        other = folders.get(path.name)
        folders[path.name] = path
        if other is not None:
            found = f"two models are named {path.name}: {other} and {path}"
            checks.append(Check(f"model {path.name}", "wrong", found, advice))
    return checks


def _switches(settings: Settings) -> list[Check]:
    advice = "set it to true again once the fault is found"
    return [
        Check("engine", "note", f"{name} is switched off: models run more slowly", advice) for name in settings.switched_off
    ]


def _gpu(settings: Settings, gpu: VisibleGpu | None, no_gpu_reason: str) -> list[Check]:
    from engine.visible_gpu import NO_ANSWER, NO_GPU

    devices = {settings.for_model(model).device for model in settings.models} or {settings.device}
    if gpu is not None:
        found = f"{gpu.name} ({gpu.memory_bytes // MIB} MiB)"
        return [Check("gpu", "ok", found), *([] if devices == {"cpu"} else _toolchain())]
    if "cuda" in devices or (no_gpu_reason.startswith(NO_ANSWER) and devices != {"cpu"}):
        return [Check("gpu", "wrong", no_gpu_reason, _no_gpu_advice(no_gpu_reason))]
    return [Check("gpu", "ok" if no_gpu_reason == NO_GPU else "note", f"{no_gpu_reason}: models run on the CPU")]


def _no_gpu_advice(reason: str) -> str:
    from engine.visible_gpu import NO_ANSWER, NO_GPU

    if reason.startswith(NO_ANSWER):
        return "look at the kernel's log (dmesg) and restart this machine, or start with --device cpu"
    if reason != NO_GPU and "CUDA_VISIBLE_DEVICES" in os.environ:
        return "correct or unset CUDA_VISIBLE_DEVICES, or omit --device"
    return "install the NVIDIA driver, or omit --device"


def _toolchain() -> list[Check]:
    from engine.triton_toolchain import toolchain_problem

    problem = toolchain_problem()
    if problem is None:
        return [Check("compiler", "ok", "kernels can be launched")]
    return [Check("compiler", "wrong", problem, "install gcc and python3-dev, or start with --device cpu")]
