"""Lets several commands run in one process without rebuilding what a command-line process builds once.

Inspecting the parameters of all commands and registering an application's routes takes longer than most commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import typer.main
from litestar import Litestar

from appliance import app
from appliance.cli import main, model_check
from appliance.serving.model_builder import DEMO_MODEL
from appliance.serving.services import Services
from tests.support.reused_app import ReusedApp


@contextmanager
def cache_between_commands() -> Iterator[None]:
    """Cache the command tree, the application (which then serves the appliance of each command), and the check of the demo
    model, which never changes."""
    with (
        mock.patch.object(main, "build", cache(main.build)),
        mock.patch.object(typer.main, "get_command", cache(typer.main.get_command)),
        mock.patch.object(app, "create_app", _reused(app.create_app)),
        mock.patch.object(model_check, "check_model", _checked_once(model_check.check_model)),
    ):
        yield


def _reused(create: Callable[[app.Appliance], Litestar]) -> Callable[[app.Appliance], Litestar]:
    reused: list[ReusedApp] = []

    def made(services: Services) -> Litestar:
        return create(cast(app.Appliance, SimpleNamespace(services=services)))

    def create_app(appliance: app.Appliance) -> Litestar:
        if not reused:
            reused.append(ReusedApp(appliance.services, made))
        reused[0].serve(appliance.services)
        return reused[0].app

    return create_app


def _checked_once(check: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    demo = cache(lambda: check(DEMO_MODEL))

    def check_model(path: Path, *options: Any, **named: Any) -> dict[str, Any]:
        return check(path, *options, **named) if options or named or path != DEMO_MODEL else dict(demo())

    return check_model
