"""`gatehouse serve`: runs the appliance in the foreground and prints a welcome once a model is ready."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.cli import output
from appliance.cli.failure import CommandFailed
from appliance.cli.model_store import locate_existing
from appliance.cli.options import DatabaseUrl, DataDir, settings_from

if TYPE_CHECKING:
    from appliance.app import Started
    from appliance.base.settings import Settings
    from appliance.cli.welcome import Welcome

PROGRESS_INTERVAL_S = 0.2
SETTLED = ("ready", "failed", "stopped")


def serve(
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Address to listen on; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Port to listen on; default: 8000.")] = None,
    data_dir: DataDir = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="MODEL", help="Folder of a model, or name of an added one; repeatable; default: the demo model."
        ),
    ] = None,
    database: DatabaseUrl = None,
    device: Annotated[str | None, typer.Option(metavar="auto|cuda|cpu", help="Device for the models; default: auto.")] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="Minimum level to log: debug, info, warning or error; default: info.")
    ] = None,
) -> None:
    """Start the appliance in the foreground. Applies migrations, loads the models and serves until Ctrl-C, then lets running
    requests finish."""
    settings = settings_from(
        data_dir, database, host=host, port=port, models=tuple(model) if model else None, device=device, log_level=log_level
    )
    _run(_with_models_located(settings))


def _with_models_located(settings: Settings) -> Settings:
    models = [
        dataclasses.replace(model, model=str(locate_existing(model.model, settings.data_dir))) for model in settings.models
    ]
    return dataclasses.replace(settings, models=tuple(models))


def _run(settings: Settings) -> None:
    import uvloop

    from appliance import app
    from appliance.api.http_server import CannotStart
    from appliance.base.logging import configure_logging
    from appliance.serving.model_folder import NotAModel

    as_json = not sys.stderr.isatty() if settings.log_json is None else settings.log_json
    configure_logging(settings.log_level, json=as_json)
    greeter = Greeter()
    try:
        uvloop.run(app.serve(settings, on_listening=greeter.listening))
    except (CannotStart, NotAModel) as error:
        raise CommandFailed(str(error), code="cannot_start") from error
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise CommandFailed(f"{error.strerror}{where}", code="cannot_start") from error


class Greeter:
    """Prints the first login at once, and the welcome once a model has loaded, so that the printed command works."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def listening(self, started: Started) -> None:
        """Print the first login and start waiting for a model. Called in the event loop once the service listens."""
        from appliance.base.interpreter import prepare_to_serve
        from appliance.cli import welcome

        prepare_to_serve()
        if started.first_start is not None:
            output.say(welcome.login(_facts(started)))
            sys.stdout.flush()
        self._task = asyncio.get_running_loop().create_task(self._greet(started), name="welcome")

    async def _greet(self, started: Started) -> None:
        from appliance.cli import welcome

        models = started.services.models.list()
        for model in models:
            with output.progress(f"Loading {model.name}", quiet=False) as report:
                while model.engine.state not in SETTLED:
                    report(model.engine.load_fraction or 0.0)
                    await asyncio.sleep(PROGRESS_INTERVAL_S)
        ready = [model.name for model in models if model.engine.state == "ready"]
        if not ready:
            return  # `serve` itself then exits with the reason
        for model in models:
            if model.engine.state == "failed":
                sys.stderr.write(f"gatehouse: the model {model.name} could not be loaded: {model.engine.error}\n")
        output.say(welcome.ready(dataclasses.replace(_facts(started), model=ready[0])))
        sys.stdout.flush()


def _facts(started: Started) -> Welcome:
    from appliance.base.settings import default_data_dir, local_url
    from appliance.cli.welcome import Welcome, program

    first, data_dir = started.first_start, started.services.settings.data_dir
    return Welcome(
        url=local_url(started.host, started.port),
        model=started.models[0],
        command=program(),
        data_dir=None if data_dir == default_data_dir() else data_dir,
        admin_email=None if first is None else first.email,
        admin_password=None if first is None else first.password,
        admin_token=None if first is None else first.admin_token,
        api_key=None if first is None else first.api_key,
    )
