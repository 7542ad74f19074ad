"""Commands that are typed one after another in one process: what a user's process makes once, for its only command, is kept.

To inspect the parameters of all commands and to register the routes of an application takes longer than most commands do.
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
from appliance.serving.fleet import DEMO_MODEL
from appliance.serving.services import Services
from tests.support.reused_app import ReusedApp


@contextmanager
def cache_between_commands() -> Iterator[None]:
    """The tree of commands, the application, which serves the appliance of one command after another, and what there is to say
    of the demo model, which nobody changes."""
    with (
        mock.patch.object(main, "build", cache(main.build)),
        mock.patch.object(typer.main, "get_command", cache(typer.main.get_command)),
        mock.patch.object(app, "create_app", _reused(app.create_app)),
        mock.patch.object(model_check, "check_model", _checked_once(model_check.check_model)),
    ):
        yield


def _reused(create: Callable[[app.Appliance], Litestar]) -> Callable[[app.Appliance], Litestar]:
    standing: list[ReusedApp] = []

    def made(services: Services) -> Litestar:
        return create(cast(app.Appliance, SimpleNamespace(services=services)))

    def create_app(appliance: app.Appliance) -> Litestar:
        if not standing:
            standing.append(ReusedApp(appliance.services, made))
        standing[0].serve(appliance.services)
        return standing[0].app

    return create_app


def _checked_once(check: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    demo = cache(lambda: check(DEMO_MODEL))

    def check_model(path: Path, *options: Any, **named: Any) -> dict[str, Any]:
        return check(path, *options, **named) if options or named or path != DEMO_MODEL else dict(demo())

    return check_model
